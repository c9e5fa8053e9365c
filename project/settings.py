"""Settings of the site: for development as they stand, for production by the environment.

Read from the environment:
    DJANGO_ENV            development (default) or production
    DEBUG                 1 or 0; default 1 in development, 0 in production
    SECRET_KEY            required in production; in development a random key is kept in the data folder
    ALLOWED_HOSTS         comma-separated; required in production
    CSRF_TRUSTED_ORIGINS  comma-separated origins, for a site behind a proxy
    DATABASE_URL          see `project.database`; unset: the embedded PostgreSQL
    DATA_DIR              where the embedded database and the key are kept; default `.data` in the checkout
    SECURE_PROXY_SSL_HEADER  e.g. `X-Forwarded-Proto`, where a proxy ends TLS and always sets that header
    LOG_LEVEL             level of the application's own loggers; default INFO
    LOG_FORMAT            line (default), or json: one object a line, with the fields of a record
"""

import os
from datetime import timedelta

from django.core.exceptions import ImproperlyConfigured

from project.database import databases
from project.development_key import development_key
from project.paths import CHECKOUT, data_directory


def _flag(name: str, default: bool) -> bool:
    text = os.environ.get(name, "").strip().lower()
    if text in ("", "1", "true", "yes", "on"):
        return default if text == "" else True
    if text in ("0", "false", "no", "off"):
        return False
    raise ImproperlyConfigured(f"{name} is {text!r}; expected 1 or 0")


def _list(name: str) -> list[str]:
    return [part.strip() for part in os.environ.get(name, "").split(",") if part.strip()]


def _required(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ImproperlyConfigured(f"{name} is not set; it is required in production (DEBUG=1 is for development)")
    return value


BASE_DIR = CHECKOUT
DATA_DIR = data_directory()

ENVIRONMENT = os.environ.get("DJANGO_ENV", "development")
if ENVIRONMENT not in ("development", "production"):
    raise ImproperlyConfigured(f"DJANGO_ENV is {ENVIRONMENT!r}; expected 'development' or 'production'")
DEBUG = _flag("DEBUG", default=ENVIRONMENT == "development")

SECRET_KEY = os.environ.get("SECRET_KEY") or (development_key(DATA_DIR) if DEBUG else _required("SECRET_KEY"))
ALLOWED_HOSTS = _list("ALLOWED_HOSTS") or (["localhost", "127.0.0.1", "[::1]"] if DEBUG else [])
if not ALLOWED_HOSTS:
    _required("ALLOWED_HOSTS")
CSRF_TRUSTED_ORIGINS = _list("CSRF_TRUSTED_ORIGINS")

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "queueapp",
    "queueapp.contrib.celery",
    "workers",
    "project.flights",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "project.urls"
WSGI_APPLICATION = "project.wsgi.application"
ASGI_APPLICATION = "project.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DATABASES = databases(os.environ.get("DATABASE_URL"))
# Celery does the periodic maintenance of the demo, with no other broker.
CELERY_BROKER_URL = CELERY_RESULT_BACKEND = "queueapp://"
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_BEAT_SCHEDULE = {"trim": {"task": "project.flights.tasks.trim", "schedule": 3600.0}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{validator}"}
    for validator in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_I18N = True
USE_TZ = True

STATIC_URL = "static/"
STATIC_ROOT = BASE_DIR / "staticfiles"

# What the demo publishes is kept for a day: Spark computes the page's figures from it once more.
QUEUEAPP = {"JOURNAL": {"FlightDelays": timedelta(days=1)}}

_log_format = os.environ.get("LOG_FORMAT", "line")
if _log_format not in ("line", "json"):
    raise ImproperlyConfigured(f"LOG_FORMAT = {_log_format!r} is not accepted: it must be line or json.")
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "line": {"format": "%(asctime)s %(levelname)s %(name)s %(process)d %(message)s"},
        # One object a line, with all attributes of a record: message_id, queue, consumer, attempt, verdict, ...
        "json": {
            "()": "pythonjsonlogger.json.JsonFormatter",
            "fmt": "%(asctime)s %(levelname)s %(name)s %(process)d %(message)s",
        },
    },
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": _log_format}},
    "loggers": {
        name: {"handlers": ["console"], "level": os.environ.get("LOG_LEVEL", "INFO"), "propagate": True}
        for name in ("queueapp", "project")
    },
}

if not DEBUG:
    SECURE_SSL_REDIRECT = True
    SECURE_HSTS_SECONDS = 365 * 24 * 3600
    SECURE_HSTS_INCLUDE_SUBDOMAINS = True
    SECURE_HSTS_PRELOAD = True
    SESSION_COOKIE_SECURE = True
    CSRF_COOKIE_SECURE = True
    if _header := os.environ.get("SECURE_PROXY_SSL_HEADER"):
        SECURE_PROXY_SSL_HEADER = (f"HTTP_{_header.upper().replace('-', '_')}", "https")
