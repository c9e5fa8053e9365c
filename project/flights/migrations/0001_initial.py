import queueapp.models
import queueapp.models.fields
import uuid
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Import",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("note", models.CharField(max_length=200)),
                ("message_id", models.UUIDField()),
                ("requested_at", models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.CreateModel(
            name="Rebooking",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("flight", models.CharField(help_text="carrier, number, origin and date", max_length=40, unique=True)),
                ("minutes", models.IntegerField()),
                ("rebooked_at", models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.CreateModel(
            name="DelayFigure",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("carrier", models.CharField(max_length=2)),
                ("origin", models.CharField(max_length=3)),
                ("hour", models.SmallIntegerField(help_text="Scheduled hour of departure, local time.")),
                ("late", models.IntegerField(default=0)),
                ("cancelled", models.IntegerField(default=0)),
                ("minutes", models.BigIntegerField(default=0, help_text="Sum of the departure delays.")),
                (
                    "rebookings",
                    models.IntegerField(default=0, help_text="Rebookings sent: delays of more than two hours."),
                ),
            ],
            options={
                "constraints": [models.UniqueConstraint(fields=("carrier", "origin", "hour"), name="one_figure_each")],
            },
        ),
        migrations.CreateModel(
            name="FlightDelays",
            fields=[
                (
                    "seq",
                    models.BigAutoField(
                        help_text="Order of arrival; the bookmark that an ack names.", primary_key=True, serialize=False
                    ),
                ),
                (
                    "id",
                    queueapp.models.fields.GuidField(default=uuid.uuid4, help_text="Made by the sender, time-ordered."),
                ),
                ("correlation_id", models.CharField(blank=True, db_column="correlationid", max_length=255, null=True)),
                (
                    "reply_to_address",
                    models.CharField(blank=True, db_column="replytoaddress", max_length=255, null=True),
                ),
                (
                    "recoverable",
                    models.BooleanField(db_default=True, help_text="Kept for wire compatibility with NServiceBus."),
                ),
                (
                    "expires",
                    queueapp.models.fields.UtcField(
                        blank=True, help_text="After this the message is dropped.", null=True
                    ),
                ),
                ("headers", models.TextField(db_default="{}", help_text="JSON object of strings.")),
                ("body", queueapp.models.fields.BytesField(blank=True, null=True)),
                (
                    "recipient",
                    models.CharField(
                        blank=True, db_default="", help_text="The consumer it is addressed to.", max_length=200
                    ),
                ),
                ("priority", models.SmallIntegerField(db_default=0)),
                ("is_barrier", models.BooleanField(db_default=False)),
                ("enqueued_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
                ("lease_token", queueapp.models.fields.GuidField(blank=True, null=True)),
                (
                    "lease_owner",
                    queueapp.models.fields.GuidField(
                        blank=True, help_text="The subscriber that holds the lease.", null=True
                    ),
                ),
                ("lease_expires", queueapp.models.fields.UtcField(blank=True, null=True)),
                ("deliveries", models.IntegerField(db_default=0, help_text="How often it was handed to a handler.")),
                ("cancels", models.IntegerField(db_default=0, help_text="How often it was given back.")),
                (
                    "failures",
                    models.TextField(blank=True, help_text="JSON list of the failed attempts so far.", null=True),
                ),
            ],
            options={
                "verbose_name_plural": "flight delays",
                "db_table": "flight_delays",
                "ordering": ["seq"],
                "abstract": False,
                "required_db_features": ["has_select_for_update_skip_locked"],
                "indexes": [
                    models.Index(
                        condition=models.Q(("expires__isnull", False)),
                        fields=["expires"],
                        name="flight_delays_8f6cf3_expires",
                    )
                ],
                "constraints": [
                    queueapp.models.TableOptions(
                        autovacuum_threshold=1000, body_string=False, fillfactor=90, name="flight_delays_8f6cf3_options"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Rebookings",
            fields=[
                (
                    "seq",
                    models.BigAutoField(
                        help_text="Order of arrival; the bookmark that an ack names.", primary_key=True, serialize=False
                    ),
                ),
                (
                    "id",
                    queueapp.models.fields.GuidField(default=uuid.uuid4, help_text="Made by the sender, time-ordered."),
                ),
                ("correlation_id", models.CharField(blank=True, db_column="correlationid", max_length=255, null=True)),
                (
                    "reply_to_address",
                    models.CharField(blank=True, db_column="replytoaddress", max_length=255, null=True),
                ),
                (
                    "recoverable",
                    models.BooleanField(db_default=True, help_text="Kept for wire compatibility with NServiceBus."),
                ),
                (
                    "expires",
                    queueapp.models.fields.UtcField(
                        blank=True, help_text="After this the message is dropped.", null=True
                    ),
                ),
                ("headers", models.TextField(db_default="{}", help_text="JSON object of strings.")),
                ("body", queueapp.models.fields.BytesField(blank=True, null=True)),
                (
                    "recipient",
                    models.CharField(
                        blank=True, db_default="", help_text="The consumer it is addressed to.", max_length=200
                    ),
                ),
                ("priority", models.SmallIntegerField(db_default=0)),
                ("is_barrier", models.BooleanField(db_default=False)),
                ("enqueued_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
                ("lease_token", queueapp.models.fields.GuidField(blank=True, null=True)),
                (
                    "lease_owner",
                    queueapp.models.fields.GuidField(
                        blank=True, help_text="The subscriber that holds the lease.", null=True
                    ),
                ),
                ("lease_expires", queueapp.models.fields.UtcField(blank=True, null=True)),
                ("deliveries", models.IntegerField(db_default=0, help_text="How often it was handed to a handler.")),
                ("cancels", models.IntegerField(db_default=0, help_text="How often it was given back.")),
                (
                    "failures",
                    models.TextField(blank=True, help_text="JSON list of the failed attempts so far.", null=True),
                ),
            ],
            options={
                "verbose_name_plural": "rebookings",
                "db_table": "flight_rebookings",
                "ordering": ["seq"],
                "abstract": False,
                "required_db_features": ["has_select_for_update_skip_locked"],
                "indexes": [
                    models.Index(
                        condition=models.Q(("expires__isnull", False)),
                        fields=["expires"],
                        name="flight_rebooki_34c662_expires",
                    )
                ],
                "constraints": [
                    queueapp.models.TableOptions(
                        autovacuum_threshold=1000,
                        body_string=False,
                        fillfactor=45,
                        name="flight_rebooki_34c662_options",
                    )
                ],
            },
        ),
    ]
