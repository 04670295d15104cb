"""Find `conf/`."""

from __future__ import annotations

import os
from pathlib import Path

import flatout
from flatout.errors import UserError


def conf_folder() -> Path:
    """`$FLATOUT_CONF`, else `conf/` beside the checkout's `src/`, else the copy inside the installed package."""
    given = os.environ.get("FLATOUT_CONF")
    package = Path(flatout.__file__).parent
    places = [Path(given)] if given else [package.parents[1] / "conf", package / "conf"]
    for place in places:
        if (place / "train.yaml").is_file():
            return place.resolve()
    raise UserError(
        "FLATOUT_CONF",
        f"no train.yaml in {', '.join(map(str, places))}",
        hint="Set FLATOUT_CONF to a folder with train.yaml, or leave it out.",
    )
