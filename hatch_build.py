"""Puts `conf/` inside the built wheel; an editable install reads it from the checkout instead."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ConfInWheel(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            build_data["force_include"]["conf"] = "flatout/conf"
