"""What goes wrong with people's data, each case with what must be said of it.

`python -m tests.data.catalogue` prints the table of cases and of what is printed.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

from tests.data.cases import Case
from tests.data.cases_of_formats import OTHER_FORMATS
from tests.data.cases_of_one_file import ONE_FILE

from flatout.data.checks.checkup import check
from flatout.data.checks.findings import Level
from flatout.errors import UserError

CASES = [*ONE_FILE, *OTHER_FORMATS]


def outcome(case: Case, folder: Path) -> str:
    """What is said of a case: the error, or all remarks."""
    try:
        found = check(case.config(folder))
    except UserError as mistake:
        return str(mistake).replace(f"{folder}/", "")
    remarks = [each for each in found.remarks if each.level is Level.error or not case.is_error]
    return "\n".join(remark.line() for remark in remarks).replace(f"{folder}/", "")


def main() -> None:
    print("| case | what is printed |\n|---|---|")
    for each in CASES:
        with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
            said = outcome(each, Path(name))
        if not each.is_error:
            said = next((line for line in said.splitlines() if each.says in line), said)
        shown = (
            (said if len(said) < 300 else said[:297] + "…").replace("|", "\\|").replace("\n", " ")
        )
        print(f"| {each.name} | {'' if each.is_error else '*accepted:* '}{shown} |")


if __name__ == "__main__":
    main()
