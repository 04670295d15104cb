"""Names that become part of a path, and folders that nothing may leave."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from flatout.errors import UserError


def is_plain_part(text: str) -> bool:
    """Whether a text can be put behind a folder and stay below it, on any system."""
    parts = re.split(r"[/\\]", text)
    is_rooted = text.startswith(("/", "\\", "~")) or bool(re.match(r"[A-Za-z]:", text))
    return bool(text) and not is_rooted and ".." not in parts and text.isprintable()


def require_inside(path: str, folders: Sequence[Path], where: str, mend: str = "Begin it with ${output}/.") -> None:
    """Refuse a path that is not below one of the folders, through links too."""
    is_odd = not path.isprintable() or path.startswith("~")
    if is_odd or not any(Path(path).resolve().is_relative_to(folder.resolve()) for folder in folders):
        raise UserError(where, f"{path!r} lies outside of the folder of all runs", allowed=str(folders[0]), mend=mend)


def lies_inside(name: str, folder: Path) -> bool:
    """Whether a file named in a folder's own manifest lies in that folder, through links too."""
    return is_plain_part(name) and (folder / name).resolve().is_relative_to(folder.resolve())
