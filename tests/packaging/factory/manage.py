"""The commands of a project that has a package `workers` of its own; tests/packaging installs the wheel beside it."""

import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    execute_from_command_line(sys.argv)
