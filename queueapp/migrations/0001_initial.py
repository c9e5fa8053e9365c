import datetime
import django.db.models.deletion
import queueapp.models.fields
import queueapp.models.journal
import queueapp.models.subscribers
import uuid
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="Alert",
            fields=[
                (
                    "key",
                    models.CharField(
                        help_text="Digest of kind, queue and name.", max_length=64, primary_key=True, serialize=False
                    ),
                ),
                ("kind", models.CharField(max_length=20)),
                ("queue", models.CharField(blank=True, max_length=200)),
                (
                    "name",
                    models.CharField(
                        blank=True, help_text="The poison group or host that the alert is about.", max_length=255
                    ),
                ),
                ("text", models.CharField(max_length=500)),
                ("since", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
                ("resolved_at", queueapp.models.fields.UtcField(blank=True, null=True)),
                (
                    "pending_channels",
                    models.CharField(
                        blank=True, db_default="", help_text="Channels that were not notified yet.", max_length=100
                    ),
                ),
                (
                    "notified_at",
                    queueapp.models.fields.UtcField(blank=True, help_text="Time of the last notification.", null=True),
                ),
                ("tries", models.IntegerField(db_default=0, default=0)),
                (
                    "next_try",
                    queueapp.models.fields.UtcField(
                        db_default=queueapp.models.fields.Now(),
                        help_text="A sender moves this forward before it sends, so that no other one sends too.",
                    ),
                ),
                ("silenced_by", models.CharField(blank=True, db_default="", default="", max_length=150)),
                (
                    "silenced_until",
                    queueapp.models.fields.UtcField(blank=True, help_text="No channel is notified before.", null=True),
                ),
            ],
            options={
                "ordering": ["since", "key"],
                "required_db_features": ["has_select_for_update_skip_locked"],
            },
        ),
        migrations.CreateModel(
            name="FairTurn",
            fields=[
                ("queue", models.CharField(max_length=200, primary_key=True, serialize=False)),
                ("last", queueapp.models.fields.GuidField()),
            ],
            options={
                "required_db_features": ["has_select_for_update_skip_locked"],
            },
        ),
        migrations.CreateModel(
            name="JournalCursor",
            fields=[
                (
                    "name",
                    models.CharField(
                        help_text="The queue's label, or 'replay' and a number.",
                        max_length=200,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("topic", models.CharField(help_text="The topic or regular expression that is read.", max_length=255)),
                (
                    "recovery_point",
                    models.CharField(db_default="", help_text="As it was declared when reading began.", max_length=100),
                ),
                ("txid", models.BigIntegerField()),
                ("seq", models.BigIntegerField()),
                (
                    "not_before",
                    queueapp.models.fields.UtcField(
                        blank=True, help_text="Entries published before this are skipped.", null=True
                    ),
                ),
                (
                    "passed_over",
                    models.TextField(
                        db_default="", help_text="Bookmarks behind the cursor that are not for the queue: JSON."
                    ),
                ),
                (
                    "review_txid",
                    models.BigIntegerField(
                        db_default=0,
                        help_text="Entries before this that the queue's filter refused are evaluated again.",
                    ),
                ),
                (
                    "copied",
                    models.BigIntegerField(
                        db_default=0, help_text="How many messages the queue has received from the journal."
                    ),
                ),
                ("attached_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
                (
                    "seen_at",
                    queueapp.models.fields.UtcField(
                        db_default=queueapp.models.fields.Now(), help_text="When a reader last used this cursor."
                    ),
                ),
            ],
            options={
                "required_db_features": ["has_select_for_update_skip_locked"],
            },
        ),
        migrations.CreateModel(
            name="Leader",
            fields=[
                ("role", models.CharField(max_length=100, primary_key=True, serialize=False)),
                ("holder", queueapp.models.fields.GuidField()),
                ("term", models.BigIntegerField(db_default=1)),
                ("elected_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
                ("expires", queueapp.models.fields.UtcField()),
            ],
            options={
                "required_db_features": ["has_select_for_update_skip_locked"],
            },
        ),
        migrations.CreateModel(
            name="BulkOperation",
            fields=[
                ("number", models.BigAutoField(primary_key=True, serialize=False)),
                ("action", models.CharField(max_length=40)),
                ("source", models.CharField(help_text="Label of the model whose rows it takes.", max_length=200)),
                (
                    "filters",
                    models.TextField(
                        default="{}", help_text="JSON: the filters of the list, by their names in its address."
                    ),
                ),
                ("options", models.TextField(default="{}", help_text="JSON: the answers of the confirmation page.")),
                (
                    "first",
                    models.BigIntegerField(
                        help_text="The first key, the last key, and the key up to which it is done."
                    ),
                ),
                ("last", models.BigIntegerField()),
                ("cursor", models.BigIntegerField()),
                ("changed", models.BigIntegerField(default=0)),
                ("skipped", models.BigIntegerField(default=0, help_text="In flight, or gone.")),
                ("failed", models.BigIntegerField(default=0)),
                (
                    "errors",
                    models.TextField(default="[]", help_text="JSON: key and error of the first messages that failed."),
                ),
                (
                    "waiting",
                    models.TextField(
                        default="{}", help_text="JSON: the messages of a canary's last batch that have not ended."
                    ),
                ),
                (
                    "note",
                    models.CharField(
                        blank=True, default="", help_text="Why it paused itself, or how it ended.", max_length=500
                    ),
                ),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("running", "Running"),
                            ("paused", "Paused"),
                            ("stopped", "Stopped"),
                            ("finished", "Finished"),
                        ],
                        default="running",
                        max_length=10,
                    ),
                ),
                (
                    "rate",
                    models.FloatField(blank=True, help_text="Messages a second; empty: as fast as it can.", null=True),
                ),
                (
                    "next_at",
                    queueapp.models.fields.UtcField(
                        db_default=queueapp.models.fields.Now(), help_text="When the next batch is due."
                    ),
                ),
                ("started_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
                ("username", models.CharField(blank=True, default="", max_length=150)),
                (
                    "changed_at",
                    queueapp.models.fields.UtcField(
                        db_default=queueapp.models.fields.Now(),
                        help_text="Time of the last batch, or of the last change by an operator.",
                    ),
                ),
                (
                    "started_by",
                    models.ForeignKey(
                        blank=True,
                        db_constraint=False,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "verbose_name": "operation",
                "ordering": ["-number"],
                "required_db_features": ["has_select_for_update_skip_locked"],
                "indexes": [models.Index(fields=["state", "next_at"], name="queueapp_bulkoperation_due")],
            },
        ),
        migrations.CreateModel(
            name="QueueSnapshot",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("queue", models.CharField(max_length=200)),
                (
                    "period",
                    models.IntegerField(help_text="Seconds that the row stands for; 0: the newest figures."),
                ),
                (
                    "at",
                    queueapp.models.fields.UtcField(
                        help_text="The beginning of the period; for period 0 the time of the figures."
                    ),
                ),
                ("ready", models.BigIntegerField(null=True)),
                ("in_flight", models.BigIntegerField(help_text="As the workers report it.", null=True)),
                ("delayed", models.BigIntegerField(null=True)),
                ("poison", models.BigIntegerField(null=True)),
                ("oldest_ms", models.BigIntegerField(help_text="Age of the oldest ready message.", null=True)),
                (
                    "seconds",
                    models.FloatField(default=0, help_text="The time in which the messages below were counted."),
                ),
                (
                    "arrived",
                    models.BigIntegerField(default=0, help_text="What was handled, and what the queue has grown by."),
                ),
                ("received", models.BigIntegerField(default=0)),
                ("handled", models.BigIntegerField(default=0)),
                ("failed", models.BigIntegerField(default=0, help_text="Failed attempts.")),
                (
                    "handling_p50",
                    models.FloatField(help_text="Seconds of a handler; of several rows the mean.", null=True),
                ),
                ("handling_p95", models.FloatField(help_text="Of several rows the highest.", null=True)),
                (
                    "stats",
                    models.TextField(blank=True, default="", help_text="JSON: all statistics, where period is 0."),
                ),
            ],
            options={
                "required_db_features": ["has_select_for_update_skip_locked"],
                "indexes": [
                    models.Index(fields=["period", "at"], name="queueapp_snapshot_newest"),
                    models.Index(fields=["queue", "period", "at"], name="queueapp_snapshot_of_queue"),
                ],
            },
        ),
        migrations.CreateModel(
            name="SubjectKey",
            fields=[
                ("id", queueapp.models.fields.GuidField(default=uuid.uuid4, primary_key=True, serialize=False)),
                ("subject", models.CharField(max_length=200, null=True, unique=True)),
                ("wrapped", queueapp.models.fields.BytesField(null=True)),
                (
                    "key",
                    models.CharField(
                        blank=True, help_text="The key of the keyring that wraps this one.", max_length=100
                    ),
                ),
                ("created_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
                ("erased_at", queueapp.models.fields.UtcField(null=True)),
            ],
            options={
                "verbose_name": "encryption key",
                "verbose_name_plural": "encryption keys",
                "permissions": [
                    ("decrypt_body", "Can read encrypted bodies in the admin"),
                    ("erase_subject", "Can destroy the keys of a subject"),
                ],
                "required_db_features": ["has_select_for_update_skip_locked"],
            },
        ),
        migrations.CreateModel(
            name="Subscriber",
            fields=[
                ("id", queueapp.models.fields.GuidField(default=uuid.uuid4, primary_key=True, serialize=False)),
                ("queue", models.CharField(db_index=True, max_length=200)),
                (
                    "table",
                    models.CharField(
                        blank=True,
                        db_default="",
                        help_text="The queue's table, where maintenance finds its leases.",
                        max_length=255,
                    ),
                ),
                ("host", models.CharField(max_length=255)),
                ("process", models.IntegerField(help_text="Process id.")),
                (
                    "process_start",
                    models.CharField(
                        blank=True,
                        db_default="",
                        help_text="Boot id and start time: process ids are reused.",
                        max_length=64,
                    ),
                ),
                ("supervisor", queueapp.models.fields.GuidField(help_text="The process tree it belongs to.")),
                ("version", models.CharField(blank=True, db_default="", max_length=64)),
                ("concurrency", models.IntegerField(db_default=1)),
                ("started_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
                ("heartbeat_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
                (
                    "alive_until",
                    queueapp.models.fields.UtcField(
                        help_text="Dead after this, by the database's clock, unless a heartbeat extends it."
                    ),
                ),
                ("received", models.BigIntegerField(db_default=0)),
                ("handled", models.BigIntegerField(db_default=0)),
                ("failed", models.BigIntegerField(db_default=0)),
                (
                    "crash_tracking",
                    models.BooleanField(
                        db_default=False,
                        help_text="It records each delivery before the handler runs, so what it left behind was being handled.",
                    ),
                ),
                (
                    "breakers",
                    models.TextField(
                        blank=True,
                        db_default="",
                        help_text="JSON: name, state and error of each circuit breaker that is not closed.",
                    ),
                ),
                (
                    "consumers",
                    models.TextField(
                        blank=True,
                        db_default="",
                        help_text="JSON: name and message type of each consumer; '': not reported.",
                    ),
                ),
                (
                    "unknown_types",
                    models.TextField(
                        blank=True,
                        db_default="",
                        help_text="JSON: message types in the queue for which it has no consumer.",
                    ),
                ),
                ("outstanding", models.IntegerField(db_default=0, help_text="In flight at the last heartbeat.")),
                (
                    "backlog",
                    models.IntegerField(
                        blank=True,
                        help_text="How many messages may be in flight at once; empty: what its batches hold.",
                        null=True,
                    ),
                ),
                (
                    "filter",
                    models.TextField(
                        blank=True,
                        db_default="",
                        help_text="Expression; it receives only messages for which this is true.",
                    ),
                ),
                (
                    "receives",
                    models.BooleanField(
                        db_default=True,
                        help_text="It collects what is assigned to it; receive() asks once and does not.",
                    ),
                ),
                (
                    "leases_lost",
                    models.BigIntegerField(
                        db_default=0, help_text="Leases that expired before their messages were ended."
                    ),
                ),
                (
                    "at_most_once",
                    models.BooleanField(
                        db_default=False,
                        help_text="What it holds was delivered at most once: it is deleted, not released, if it dies.",
                    ),
                ),
                (
                    "progress",
                    models.TextField(
                        blank=True, db_default="", help_text="JSON: progress that handlers report, by message."
                    ),
                ),
                (
                    "handling_p50",
                    models.FloatField(
                        blank=True, help_text="Seconds of a handler: the median of the last 500 calls.", null=True
                    ),
                ),
                ("handling_p95", models.FloatField(blank=True, null=True)),
                ("memory", models.BigIntegerField(blank=True, help_text="Resident bytes of the process.", null=True)),
                (
                    "restarts",
                    models.IntegerField(db_default=0, help_text="How often its supervisor has started it again."),
                ),
                (
                    "running",
                    models.TextField(
                        blank=True,
                        db_default="",
                        help_text="JSON: seq, consumer and seconds of the handlers that run for some time.",
                    ),
                ),
                (
                    "stop_requested",
                    models.BooleanField(db_default=False, help_text="Its tree stops at the next heartbeat."),
                ),
            ],
            options={
                "verbose_name": "worker",
                "ordering": ["queue", "host", "process"],
                "required_db_features": ["has_select_for_update_skip_locked"],
            },
        ),
        migrations.CreateModel(
            name="BarrierDelivery",
            fields=[
                (
                    "message_id",
                    queueapp.models.fields.GuidField(db_index=True, help_text="The message's id, which never changes."),
                ),
                ("headers", models.TextField(db_default="{}")),
                ("body", queueapp.models.fields.BytesField(blank=True, null=True)),
                ("expires", queueapp.models.fields.UtcField(blank=True, null=True)),
                ("recipient", models.CharField(blank=True, db_default="", max_length=200)),
                (
                    "priority",
                    models.BigIntegerField(db_default=0, help_text="64 bits on queues with a priority expression."),
                ),
                ("is_barrier", models.BooleanField(db_default=False)),
                ("correlation_id", models.CharField(blank=True, max_length=255, null=True)),
                ("reply_to_address", models.CharField(blank=True, max_length=255, null=True)),
                (
                    "enqueued_at",
                    queueapp.models.fields.UtcField(
                        db_default=queueapp.models.fields.Now(),
                        help_text="When it first entered its queue, or this table.",
                    ),
                ),
                ("deliveries", models.IntegerField(db_default=0)),
                ("cancels", models.IntegerField(db_default=0)),
                (
                    "failures",
                    models.TextField(blank=True, help_text="JSON list of the failed attempts so far.", null=True),
                ),
                ("number", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "queue",
                    models.CharField(help_text="Label (app.Model) of the queue the barrier was in.", max_length=200),
                ),
                ("seq", models.BigIntegerField(help_text="Its seq in that queue.")),
                ("subscriber", queueapp.models.fields.GuidField(help_text="The subscriber that receives it.")),
                ("released_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
            ],
            options={
                "verbose_name": "barrier delivery",
                "verbose_name_plural": "barrier deliveries",
                "ordering": ["number"],
                "required_db_features": ["has_select_for_update_skip_locked"],
                "indexes": [models.Index(fields=["subscriber", "number"], name="queueapp_barrier_for")],
            },
        ),
        migrations.CreateModel(
            name="ClaimRecord",
            fields=[
                ("number", models.BigAutoField(primary_key=True, serialize=False)),
                ("queue", models.BigIntegerField(help_text="Number of the queue's lock, a hash of its table's name.")),
                ("permits", models.IntegerField(help_text="How many messages it may lease.")),
                (
                    "seqs",
                    queueapp.models.fields.RangesField(
                        help_text="The leased messages; null: not known yet.", null=True
                    ),
                ),
                ("made_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
            ],
            options={
                "required_db_features": ["has_select_for_update_skip_locked"],
                "indexes": [models.Index(fields=["queue", "number"], name="queueapp_claims_of")],
            },
        ),
        migrations.CreateModel(
            name="DeferredAck",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("queue", models.CharField(help_text="Label of the queue.", max_length=200)),
                ("message_id", queueapp.models.fields.GuidField()),
                ("kind", models.CharField(choices=[("ack", "Ack"), ("expire", "Expire")], max_length=10)),
                ("expires", queueapp.models.fields.UtcField(help_text="After this the row is deleted.")),
            ],
            options={
                "required_db_features": ["has_select_for_update_skip_locked"],
                "indexes": [models.Index(fields=["expires"], name="queueapp_deferredack_old")],
                "constraints": [
                    models.UniqueConstraint(fields=("queue", "message_id"), name="queueapp_deferredack_of")
                ],
            },
        ),
        migrations.CreateModel(
            name="DelayedMessage",
            fields=[
                (
                    "message_id",
                    queueapp.models.fields.GuidField(db_index=True, help_text="The message's id, which never changes."),
                ),
                ("headers", models.TextField(db_default="{}")),
                ("body", queueapp.models.fields.BytesField(blank=True, null=True)),
                ("expires", queueapp.models.fields.UtcField(blank=True, null=True)),
                ("recipient", models.CharField(blank=True, db_default="", max_length=200)),
                (
                    "priority",
                    models.BigIntegerField(db_default=0, help_text="64 bits on queues with a priority expression."),
                ),
                ("is_barrier", models.BooleanField(db_default=False)),
                ("correlation_id", models.CharField(blank=True, max_length=255, null=True)),
                ("reply_to_address", models.CharField(blank=True, max_length=255, null=True)),
                (
                    "enqueued_at",
                    queueapp.models.fields.UtcField(
                        db_default=queueapp.models.fields.Now(),
                        help_text="When it first entered its queue, or this table.",
                    ),
                ),
                ("deliveries", models.IntegerField(db_default=0)),
                ("cancels", models.IntegerField(db_default=0)),
                (
                    "failures",
                    models.TextField(blank=True, help_text="JSON list of the failed attempts so far.", null=True),
                ),
                ("number", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "destination",
                    models.CharField(help_text="Label (app.Model) of the queue it is sent to.", max_length=200),
                ),
                ("due", queueapp.models.fields.UtcField(db_index=True, help_text="By the database's clock.")),
                ("stored_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
                (
                    "retries",
                    models.IntegerField(db_default=0, help_text="Failed dispatches so far (see NUMBER_OF_RETRIES)."),
                ),
            ],
            options={
                "verbose_name": "delayed message",
                "ordering": ["due", "number"],
                "required_db_features": ["has_select_for_update_skip_locked"],
                "indexes": [models.Index(fields=["destination", "due", "number"], name="queueapp_delayed_first")],
            },
        ),
        migrations.CreateModel(
            name="ForwardedMessage",
            fields=[
                (
                    "id",
                    queueapp.models.fields.GuidField(
                        help_text="Hash of the message's id, its number in the store and when it was stored.",
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("message_id", queueapp.models.fields.GuidField()),
                (
                    "origin",
                    models.CharField(help_text="The database whose delayed store it came from.", max_length=200),
                ),
                ("arrived_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
            ],
            options={
                "required_db_features": ["has_select_for_update_skip_locked"],
                "indexes": [models.Index(fields=["origin", "arrived_at"], name="queueapp_forwarded_old")],
            },
        ),
        migrations.CreateModel(
            name="JournalCopied",
            fields=[
                ("number", models.BigAutoField(primary_key=True, serialize=False)),
                ("queue", models.CharField(max_length=200)),
                ("seq", models.BigIntegerField()),
            ],
            options={
                "required_db_features": ["has_select_for_update_skip_locked"],
                "constraints": [models.UniqueConstraint(fields=("queue", "seq"), name="queueapp_journal_copied")],
            },
        ),
        queueapp.models.journal.CreateJournal(
            name="JournalEntry",
            fields=[
                ("seq", models.BigAutoField(help_text="The bookmark.", primary_key=True, serialize=False)),
                ("txid", queueapp.models.journal.PositionField(editable=False)),
                ("topic", models.CharField(max_length=255)),
                ("message_id", queueapp.models.fields.GuidField(help_text="The message's id, the same in each queue.")),
                (
                    "queues",
                    models.TextField(
                        db_default="",
                        help_text="Labels of the queues that received it when it was published: |a.B|c.D|.",
                    ),
                ),
                ("headers", models.TextField(db_default="{}")),
                ("body", queueapp.models.fields.BytesField(blank=True, null=True)),
                ("published_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
                ("expires", queueapp.models.fields.UtcField(blank=True, null=True)),
                ("recipient", models.CharField(blank=True, db_default="", max_length=200)),
                ("priority", models.SmallIntegerField(db_default=0)),
                ("correlation_id", models.CharField(blank=True, max_length=255, null=True)),
                ("reply_to_address", models.CharField(blank=True, max_length=255, null=True)),
                ("is_barrier", models.BooleanField(db_default=False)),
            ],
            options={
                "verbose_name_plural": "journal entries",
                "permissions": [("replay_journalentry", "Can replay the journal into queues")],
                "required_db_features": ["has_select_for_update_skip_locked"],
                "indexes": [models.Index(fields=["topic", "txid", "seq"], name="queueapp_journal_position")],
            },
        ),
        migrations.CreateModel(
            name="MessageKey",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("queue", models.CharField(max_length=200)),
                ("key", models.CharField(max_length=64)),
                ("message_id", queueapp.models.fields.GuidField()),
                ("changed_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
            ],
            options={
                "required_db_features": ["has_select_for_update_skip_locked"],
                "indexes": [models.Index(fields=["changed_at"], name="queueapp_messagekey_old")],
                "constraints": [models.UniqueConstraint(fields=("queue", "key"), name="queueapp_messagekey_of")],
            },
        ),
        migrations.CreateModel(
            name="PoisonMessage",
            fields=[
                (
                    "message_id",
                    queueapp.models.fields.GuidField(db_index=True, help_text="The message's id, which never changes."),
                ),
                ("headers", models.TextField(db_default="{}")),
                ("body", queueapp.models.fields.BytesField(blank=True, null=True)),
                ("expires", queueapp.models.fields.UtcField(blank=True, null=True)),
                ("recipient", models.CharField(blank=True, db_default="", max_length=200)),
                (
                    "priority",
                    models.BigIntegerField(db_default=0, help_text="64 bits on queues with a priority expression."),
                ),
                ("is_barrier", models.BooleanField(db_default=False)),
                ("correlation_id", models.CharField(blank=True, max_length=255, null=True)),
                ("reply_to_address", models.CharField(blank=True, max_length=255, null=True)),
                (
                    "enqueued_at",
                    queueapp.models.fields.UtcField(
                        db_default=queueapp.models.fields.Now(),
                        help_text="When it first entered its queue, or this table.",
                    ),
                ),
                ("deliveries", models.IntegerField(db_default=0)),
                ("cancels", models.IntegerField(db_default=0)),
                (
                    "failures",
                    models.TextField(blank=True, help_text="JSON list of the failed attempts so far.", null=True),
                ),
                ("number", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "status",
                    models.CharField(
                        choices=[("unresolved", "Unresolved"), ("archived", "Archived"), ("edited", "Edited")],
                        db_default="unresolved",
                        default="unresolved",
                        max_length=20,
                    ),
                ),
                ("queue", models.CharField(help_text="Label (app.Model) of the queue it came from.", max_length=200)),
                (
                    "destination",
                    models.CharField(
                        blank=True,
                        db_default="",
                        help_text="Its destination, if that is another queue.",
                        max_length=200,
                    ),
                ),
                ("consumer", models.CharField(blank=True, db_default="", max_length=200)),
                ("message_type", models.CharField(blank=True, db_default="", max_length=255)),
                ("reason", models.CharField(help_text="Why it is poison, in one line.", max_length=500)),
                ("attempts", models.IntegerField(db_default=0)),
                ("exception_type", models.CharField(blank=True, db_default="", max_length=255)),
                ("exception_message", models.TextField(blank=True, db_default="")),
                ("traceback", models.TextField(blank=True, db_default="")),
                ("first_failed_at", queueapp.models.fields.UtcField(blank=True, null=True)),
                ("failed_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
                ("host", models.CharField(blank=True, db_default="", max_length=255)),
                (
                    "process",
                    models.CharField(blank=True, db_default="", help_text="Process id and thread.", max_length=64),
                ),
                ("worker_version", models.CharField(blank=True, db_default="", max_length=64)),
                (
                    "group_key",
                    models.CharField(
                        blank=True,
                        db_default="",
                        help_text="The same for the same exception at the same place.",
                        max_length=64,
                    ),
                ),
                (
                    "edit_of",
                    queueapp.models.fields.GuidField(
                        blank=True, help_text="The message this one was edited from.", null=True
                    ),
                ),
                (
                    "edited_as",
                    queueapp.models.fields.GuidField(
                        blank=True, help_text="The message that was sent in its place.", null=True
                    ),
                ),
                (
                    "archived_at",
                    queueapp.models.fields.UtcField(
                        blank=True,
                        help_text="When it was archived or edited. POISON_RETENTION counts from then.",
                        null=True,
                    ),
                ),
            ],
            options={
                "verbose_name": "poison message",
                "ordering": ["-failed_at", "-number"],
                "permissions": [
                    ("requeue_poisonmessage", "Can requeue poison messages"),
                    ("edit_poisonmessage", "Can edit poison messages and requeue the copy"),
                ],
                "required_db_features": ["has_select_for_update_skip_locked"],
                "indexes": [
                    models.Index(fields=["queue", "status", "failed_at"], name="queueapp_poison_queue"),
                    models.Index(fields=["group_key", "status"], name="queueapp_poison_group"),
                    models.Index(fields=["status", "failed_at"], name="queueapp_poison_status"),
                ],
            },
        ),
        migrations.CreateModel(
            name="PoisonNote",
            fields=[
                ("number", models.BigAutoField(primary_key=True, serialize=False)),
                ("group_key", models.CharField(max_length=64)),
                (
                    "queue",
                    models.CharField(
                        blank=True,
                        db_default="",
                        default="",
                        help_text="The queue of a canary; empty: an operator's.",
                        max_length=200,
                    ),
                ),
                (
                    "version",
                    models.CharField(
                        blank=True,
                        db_default="",
                        default="",
                        help_text="The worker version of a canary.",
                        max_length=64,
                    ),
                ),
                ("text", models.CharField(max_length=1000)),
                ("username", models.CharField(blank=True, db_default="", default="", max_length=150)),
                ("written_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
            ],
            options={
                "verbose_name": "note on a poison group",
                "ordering": ["-number"],
                "default_permissions": (),
                "required_db_features": ["has_select_for_update_skip_locked"],
                "indexes": [models.Index(fields=["group_key", "number"], name="queueapp_poisonnote_of")],
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("version__gt", "")),
                        fields=("group_key", "queue", "version"),
                        name="queueapp_poisonnote_canary",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="ProcessedMessage",
            fields=[
                ("key", models.CharField(max_length=64, primary_key=True, serialize=False)),
                ("queue", models.CharField(max_length=200)),
                ("processed_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
            ],
            options={
                "required_db_features": ["has_select_for_update_skip_locked"],
                "indexes": [models.Index(fields=["processed_at"], name="queueapp_processed_old")],
            },
        ),
        migrations.CreateModel(
            name="QueueControl",
            fields=[
                ("queue", models.CharField(max_length=200, primary_key=True, serialize=False)),
                ("paused", models.BooleanField(db_default=False, default=False)),
                (
                    "concurrency",
                    models.PositiveSmallIntegerField(
                        blank=True,
                        help_text="Receivers of each worker process; empty: as the worker was started.",
                        null=True,
                    ),
                ),
                (
                    "max_backlog",
                    models.IntegerField(
                        blank=True,
                        help_text="Overrides Delivery.max_backlog; empty: as declared. The fields below override likewise.",
                        null=True,
                    ),
                ),
                ("target_queue_depth", models.BigIntegerField(blank=True, null=True)),
                ("lease_period", models.DurationField(blank=True, null=True)),
                ("expiration", models.DurationField(blank=True, null=True)),
                (
                    "crash_tracking_until",
                    queueapp.models.fields.UtcField(
                        blank=True,
                        help_text="Until then workers record each delivery before its handler runs.",
                        null=True,
                    ),
                ),
                (
                    "cancelling",
                    models.TextField(
                        blank=True,
                        db_default="",
                        help_text="JSON: messages whose handlers are asked to stop, and since when.",
                    ),
                ),
                ("changed_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
                (
                    "changed_by",
                    models.ForeignKey(
                        blank=True,
                        db_constraint=False,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "last_death",
                    models.CharField(blank=True, db_default="", help_text="That worker, and how many.", max_length=300),
                ),
                (
                    "last_death_at",
                    queueapp.models.fields.UtcField(
                        blank=True, help_text="When the leases of a dead worker were last released.", null=True
                    ),
                ),
            ],
            options={
                "verbose_name": "queue",
                "permissions": [("operate_queue", "Can pause, resume and purge queues")],
                "required_db_features": ["has_select_for_update_skip_locked"],
            },
        ),
        migrations.CreateModel(
            name="SparkCommit",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("queue", models.CharField(help_text="Label of the queue, app.Model.", max_length=200)),
                (
                    "publish_id",
                    models.CharField(help_text="The job's publish_id, or the streaming query's id.", max_length=200),
                ),
                (
                    "batch_id",
                    models.BigIntegerField(help_text="The micro-batch of a streaming query; 0 for a batch job."),
                ),
                ("rows", models.BigIntegerField(help_text="Messages added to the queue.")),
                ("tasks", models.IntegerField(help_text="Spark tasks that staged them.")),
                ("committed_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
                (
                    "pending",
                    models.TextField(
                        blank=True,
                        help_text="Staging tables to be moved (atomic = false) or prepared transactions to be committed, as JSON.",
                        null=True,
                    ),
                ),
            ],
            options={
                "ordering": ["-id"],
                "required_db_features": ["has_select_for_update_skip_locked"],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("queue", "publish_id", "batch_id"), name="queueapp_sparkcommit_once"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Subscription",
            fields=[
                ("number", models.BigAutoField(primary_key=True, serialize=False)),
                ("queue", models.CharField(help_text="Label of the queue.", max_length=200)),
                ("consumer", models.CharField(help_text="The recipient of its copies.", max_length=200)),
                (
                    "type_name",
                    models.CharField(
                        blank=True, db_default="", help_text="Empty: messages without a type.", max_length=400
                    ),
                ),
                (
                    "aliases",
                    models.TextField(
                        blank=True,
                        db_default="",
                        help_text="JSON: former names of the consumer, which get no copies of their own.",
                    ),
                ),
                ("mark", models.BigIntegerField(default=queueapp.models.subscribers.new_mark, editable=False)),
                ("made_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now(), editable=False)),
                (
                    "seen_at",
                    queueapp.models.fields.UtcField(
                        db_default=queueapp.models.fields.Now(),
                        editable=False,
                        help_text="When code with this consumer was last started.",
                    ),
                ),
            ],
            options={
                "ordering": ["queue", "consumer", "type_name"],
                "required_db_features": ["has_select_for_update_skip_locked"],
                "constraints": [
                    models.UniqueConstraint(fields=("queue", "consumer", "type_name"), name="queueapp_subscription_of")
                ],
            },
        ),
        migrations.CreateModel(
            name="Schedule",
            fields=[
                ("name", models.CharField(max_length=200, primary_key=True, serialize=False)),
                ("queue", models.CharField(help_text="Label of the queue, app.Model.", max_length=200)),
                (
                    "task",
                    models.CharField(
                        blank=True,
                        db_default="",
                        default="",
                        help_text="Path of a Django task; empty: a message.",
                        max_length=400,
                    ),
                ),
                (
                    "tags",
                    models.CharField(
                        blank=True, db_default="", default="", help_text="Separated by commas.", max_length=400
                    ),
                ),
                (
                    "cron",
                    models.CharField(
                        blank=True,
                        db_default="",
                        default="",
                        help_text="Five fields, or six with seconds first.",
                        max_length=200,
                    ),
                ),
                ("every", models.DurationField(blank=True, help_text="An interval, in place of cron.", null=True)),
                (
                    "at",
                    queueapp.models.fields.UtcField(
                        blank=True, help_text="A single time, in place of cron.", null=True
                    ),
                ),
                (
                    "timezone",
                    models.CharField(
                        blank=True,
                        db_default="",
                        default="",
                        help_text="Of cron; empty: TIME_ZONE of the settings.",
                        max_length=64,
                    ),
                ),
                (
                    "start",
                    queueapp.models.fields.UtcField(
                        blank=True, help_text="Nothing is sent before; an interval counts from here.", null=True
                    ),
                ),
                ("end", queueapp.models.fields.UtcField(blank=True, help_text="Nothing is sent after.", null=True)),
                (
                    "jitter",
                    models.DurationField(
                        blank=True, help_text="Each run is up to so much later, evenly spread.", null=True
                    ),
                ),
                (
                    "misfire",
                    models.CharField(
                        choices=[
                            ("once", "one run for all of them"),
                            ("all", "each of them, the newest misfire_limit"),
                            ("skip", "none of them"),
                        ],
                        default="once",
                        max_length=4,
                    ),
                ),
                ("misfire_limit", models.PositiveIntegerField(db_default=100, default=100)),
                (
                    "misfire_grace",
                    models.DurationField(
                        default=datetime.timedelta(seconds=60), help_text="A run is missed when it is later than this."
                    ),
                ),
                (
                    "headers",
                    models.TextField(
                        blank=True, db_default="", default="", help_text="JSON object; the type is among them."
                    ),
                ),
                ("body", models.TextField(blank=True, db_default="null", default="null", help_text="JSON.")),
                (
                    "options",
                    models.TextField(
                        blank=True, db_default="", default="", help_text="JSON: further arguments of send."
                    ),
                ),
                ("paused", models.BooleanField(db_default=False, default=False)),
                (
                    "declared",
                    models.CharField(
                        blank=True,
                        db_default="",
                        default="",
                        editable=False,
                        help_text="Digest of its declaration in code; empty: made in the admin.",
                        max_length=64,
                    ),
                ),
                (
                    "next_at",
                    queueapp.models.fields.UtcField(
                        blank=True, editable=False, help_text="The next run; null: there is none.", null=True
                    ),
                ),
                (
                    "due_at",
                    queueapp.models.fields.UtcField(
                        blank=True,
                        db_index=True,
                        editable=False,
                        help_text="Its jitter, or a wait after a failure, added.",
                        null=True,
                    ),
                ),
                (
                    "last_at",
                    queueapp.models.fields.UtcField(
                        blank=True, editable=False, help_text="The time that the last run was for.", null=True
                    ),
                ),
                ("last_sent_at", queueapp.models.fields.UtcField(blank=True, editable=False, null=True)),
                (
                    "last_id",
                    queueapp.models.fields.GuidField(
                        blank=True, editable=False, help_text="Id of the message of the last run.", null=True
                    ),
                ),
                ("runs", models.BigIntegerField(db_default=0, default=0, editable=False)),
                ("failures", models.IntegerField(db_default=0, default=0, editable=False, help_text="In a row.")),
                ("error", models.CharField(blank=True, db_default="", default="", editable=False, max_length=500)),
                ("made_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now(), editable=False)),
            ],
            options={
                "ordering": ["name"],
                "required_db_features": ["has_select_for_update_skip_locked"],
            },
        ),
        migrations.CreateModel(
            name="TokenBucket",
            fields=[
                ("queue", models.CharField(max_length=200, primary_key=True, serialize=False)),
                ("tokens", models.FloatField()),
                ("filled_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
            ],
            options={
                "required_db_features": ["has_select_for_update_skip_locked"],
            },
        ),
        migrations.CreateModel(
            name="KeyTokenBucket",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("queue", models.CharField(max_length=200)),
                ("key", models.CharField(max_length=200)),
                ("full_at", queueapp.models.fields.UtcField()),
            ],
            options={
                "required_db_features": ["has_select_for_update_skip_locked"],
                "constraints": [models.UniqueConstraint(fields=("queue", "key"), name="queueapp_keytokenbucket_key")],
            },
        ),
        migrations.CreateModel(
            name="GroupAddition",
            fields=[
                ("number", models.BigAutoField(primary_key=True, serialize=False)),
                ("group_id", queueapp.models.fields.GuidField(db_index=True)),
                ("members", models.IntegerField()),
            ],
            options={
                "required_db_features": ["has_select_for_update_skip_locked"],
            },
        ),
        migrations.CreateModel(
            name="GroupMessage",
            fields=[
                (
                    "message_id",
                    queueapp.models.fields.GuidField(db_index=True, help_text="The message's id, which never changes."),
                ),
                ("headers", models.TextField(db_default="{}")),
                ("body", queueapp.models.fields.BytesField(blank=True, null=True)),
                ("expires", queueapp.models.fields.UtcField(blank=True, null=True)),
                ("recipient", models.CharField(blank=True, db_default="", max_length=200)),
                (
                    "priority",
                    models.BigIntegerField(db_default=0, help_text="64 bits on queues with a priority expression."),
                ),
                ("is_barrier", models.BooleanField(db_default=False)),
                ("correlation_id", models.CharField(blank=True, max_length=255, null=True)),
                ("reply_to_address", models.CharField(blank=True, max_length=255, null=True)),
                (
                    "enqueued_at",
                    queueapp.models.fields.UtcField(
                        db_default=queueapp.models.fields.Now(),
                        help_text="When it first entered its queue, or this table.",
                    ),
                ),
                ("deliveries", models.IntegerField(db_default=0)),
                ("cancels", models.IntegerField(db_default=0)),
                (
                    "failures",
                    models.TextField(blank=True, help_text="JSON list of the failed attempts so far.", null=True),
                ),
                ("number", models.BigAutoField(primary_key=True, serialize=False)),
                ("group_id", queueapp.models.fields.GuidField(db_index=True)),
                (
                    "destination",
                    models.CharField(help_text="Label (app.Model) of the queue it is sent to.", max_length=200),
                ),
                ("on_failure", models.BooleanField(db_default=False)),
            ],
            options={
                "required_db_features": ["has_select_for_update_skip_locked"],
            },
        ),
        migrations.CreateModel(
            name="GroupMember",
            fields=[
                (
                    "message_id",
                    queueapp.models.fields.GuidField(
                        help_text="The message; or the inner group; or what keeps the group open.",
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("group_id", queueapp.models.fields.GuidField()),
                (
                    "outcome",
                    models.SmallIntegerField(
                        choices=[(0, "Waiting"), (1, "Poison"), (2, "Dropped")], db_default=0, default=0
                    ),
                ),
                ("nested", models.BooleanField(db_default=False)),
            ],
            options={
                "verbose_name": "group member",
                "required_db_features": ["has_select_for_update_skip_locked"],
                "indexes": [models.Index(fields=["group_id", "outcome", "message_id"], name="queueapp_groupmember_of")],
            },
        ),
        migrations.CreateModel(
            name="MessageGroup",
            fields=[
                ("id", queueapp.models.fields.GuidField(primary_key=True, serialize=False)),
                ("name", models.CharField(blank=True, db_default="", max_length=200)),
                (
                    "parent",
                    queueapp.models.fields.GuidField(
                        blank=True, help_text="The group that this one is a member of.", null=True
                    ),
                ),
                (
                    "depth",
                    models.IntegerField(
                        db_default=0, help_text="Groups around it. Rows are locked from the inside outwards."
                    ),
                ),
                ("created_at", queueapp.models.fields.UtcField(db_default=queueapp.models.fields.Now())),
                ("completed_at", queueapp.models.fields.UtcField(blank=True, null=True)),
                (
                    "done",
                    models.BigIntegerField(
                        blank=True, help_text="Members that were handled; set on completion.", null=True
                    ),
                ),
                ("failed", models.BigIntegerField(blank=True, null=True)),
            ],
            options={
                "verbose_name": "message group",
                "ordering": ["-created_at"],
                "required_db_features": ["has_select_for_update_skip_locked"],
                "indexes": [
                    models.Index(fields=["completed_at"], name="queueapp_group_old"),
                    models.Index(fields=["created_at"], name="queueapp_group_new"),
                ],
            },
        ),
        migrations.CreateModel(
            name="MessageResult",
            fields=[
                (
                    "id",
                    queueapp.models.fields.GuidField(
                        help_text="The id of the message.", primary_key=True, serialize=False
                    ),
                ),
                ("queue", models.CharField(max_length=200)),
                ("headers", models.TextField(default="{}", help_text="How the value is encoded.")),
                (
                    "body",
                    queueapp.models.fields.BytesField(
                        blank=True, help_text="The value, as its queue would store it.", null=True
                    ),
                ),
                (
                    "error",
                    models.TextField(
                        blank=True, default="", help_text="Of a poison message; '' for one that was handled."
                    ),
                ),
                (
                    "attempts",
                    models.IntegerField(blank=True, help_text="Unknown where a client has acked it.", null=True),
                ),
                (
                    "started_at",
                    queueapp.models.fields.UtcField(blank=True, help_text="When the last attempt started.", null=True),
                ),
                ("finished_at", queueapp.models.fields.UtcField()),
                ("expires_at", queueapp.models.fields.UtcField(help_text="When maintenance deletes it.")),
            ],
            options={
                "verbose_name": "message result",
                "ordering": ["-id"],
                "required_db_features": ["has_select_for_update_skip_locked"],
                "indexes": [models.Index(fields=["expires_at"], name="queueapp_result_old")],
            },
        ),
        migrations.CreateModel(
            name="LedgerCheck",
            fields=[
                ("queue", models.CharField(max_length=200, primary_key=True, serialize=False)),
                (
                    "opened_at",
                    queueapp.models.fields.UtcField(
                        blank=True, help_text="When the last opening balance was written.", null=True
                    ),
                ),
                ("checked_at", queueapp.models.fields.UtcField(blank=True, null=True)),
                (
                    "closed_at",
                    queueapp.models.fields.UtcField(
                        blank=True, help_text="The last time that the ledger closed.", null=True
                    ),
                ),
                ("in_queue", models.BigIntegerField(db_default=0, default=0)),
                ("in_delayed", models.BigIntegerField(db_default=0, default=0)),
                ("in_poison", models.BigIntegerField(db_default=0, default=0)),
                (
                    "error",
                    models.CharField(
                        blank=True, db_default="", default="", help_text="Why it was not checked.", max_length=300
                    ),
                ),
            ],
            options={
                "required_db_features": ["has_select_for_update_skip_locked"],
            },
        ),
        migrations.CreateModel(
            name="LedgerEntry",
            fields=[
                ("number", models.BigAutoField(primary_key=True, serialize=False)),
                ("queue", models.CharField(max_length=200)),
                ("place", models.SmallIntegerField(choices=[(0, "Queue"), (1, "Delayed"), (2, "Poison")])),
                ("kind", models.CharField(help_text="opening, sent, acked, expired, or moved.", max_length=8)),
                ("messages", models.BigIntegerField()),
                ("minute", queueapp.models.fields.UtcField()),
                ("level", models.SmallIntegerField(db_default=0, help_text="1: the sum of a minute; 2: of a day.")),
            ],
            options={
                "verbose_name_plural": "ledger entries",
                "required_db_features": ["has_select_for_update_skip_locked"],
            },
        ),
    ]
