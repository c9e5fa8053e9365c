"""``python -m tests.benchmarks [FIGURE ...]``: measure, print a table, write bench.json. Status 1: a bar was missed."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from contextlib import closing
from pathlib import Path

from tests.benchmarks.figures import Measurement, Result, Scale, chosen
from tests.benchmarks.report import Progress, heading, line, summary, write_json


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help="names of figures, * matches; default: all")
    parser.add_argument("--runs", type=int, default=5, help="samples of each figure (default 5)")
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="where to write (default bench.json)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the messages: does it run at all?")
    parser.add_argument("--list", action="store_true", help="name the figures and end")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error(f"--runs {arguments.runs} is not accepted: 1 or more.")
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.benchmarks.settings"

    import django

    django.setup()
    try:
        measurements = chosen(arguments.figures)
    except LookupError as error:
        parser.error(str(error))
    if arguments.list:
        for measurement in measurements:
            for figure in measurement.figures:
                print(f"{figure.name:<26} {figure.bar:<8} {figure.meaning}")
        return 0
    return run(measurements, Scale(arguments.runs, arguments.quick), arguments.json)


def run(measurements: list[Measurement], scale: Scale, json_path: Path) -> int:
    """Measure everything; what was measured before a Ctrl-C is reported all the same."""
    from tests.benchmarks.rig.database import fresh_database

    results: list[Result] = []
    progress = Progress(len(measurements) * scale.runs)
    interrupted = False
    print(heading(), flush=True)
    try:
        with fresh_database():
            for measurement in measurements:
                for result in measure(measurement, scale, progress):
                    results.append(result)
                    progress.clear()
                    print(line(result), flush=True)
    except KeyboardInterrupt:
        interrupted = True
    progress.clear()
    if results:
        write_json(json_path, results)
        print(summary(results), f"Written to {json_path}.")
    if interrupted:
        print("Interrupted.", file=sys.stderr)
        return 130
    return 0 if all(result.ok for result in results) else 1


def measure(measurement: Measurement, scale: Scale, progress: Progress) -> list[Result]:
    """All runs of one measurement."""
    results = {figure.name: Result(figure) for figure in measurement.figures}
    names = ", ".join(results)
    progress.show(names)
    # Closed at once, also by an exception: the workers of a measurement end with it.
    with closing(measurement.run(scale)) as samples:  # type: ignore[type-var]
        try:
            for sample in samples:
                for name, value in sample.items():
                    results[name].samples.append(value)
                progress.advance()
                progress.show(names)
        except Exception as error:
            # The other figures are worth having all the same.
            progress.clear()
            traceback.print_exc()
            for result in results.values():
                result.error = f"{type(error).__name__}: {error}".splitlines()[0]
    return list(results.values())


if __name__ == "__main__":
    sys.exit(main())
