"""What must never be executed: things a `_target_` could name, places it could stand in, and ways
to hide it.

`<canary>` stands for a file that a payload would make, `<bait>` for a folder of files that would
make it when they are loaded or imported. A case is one attempt: words of a command line, files of
settings, and what is in the environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from tests.hostile.payloads import CALLS, FUNCTIONS, IMPORTED, LEADING_OUT, ODD_NAMES, Settings


@dataclass(frozen=True, slots=True)
class Case:
    """One attempt to have something executed."""

    name: str
    words: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    """Files below a folder that is given by `--config-dir`."""
    environment: dict[str, str] = field(default_factory=dict)
    is_whole: bool = False
    """Whether Hydra itself must run for it: composing alone would not show it."""


def as_value(value: object) -> str:
    """A value as the command line of Hydra takes it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(as_value(item) for item in value) + "]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return json.dumps(value)


def _callback(name: str, settings: object, **others: Any) -> Case:
    return Case(name, (f"+callbacks.x={as_value(settings)}",), **others)


def _in_places(call: Settings) -> Iterator[Case]:
    """The same call where settings are free, and where Hydra looks before a run begins."""
    name = call["_target_"]
    value = as_value(call)
    inner = as_value({"_target_": "torch.nn.Sequential", "_args_": [call]})
    yield Case(
        f"{name} as an argument", (f"+callbacks.x={{_target_:lightning.Callback,y:{value}}}",)
    )
    yield Case(
        f"{name} deep in arguments",
        (f"+callbacks.x={{_target_:lightning.Callback,y:{{z:[1,[{value}]]}}}}",),
    )
    yield Case(f"{name} in a list", (f"+callbacks.x={inner}",))
    yield Case(f"{name} in a bare list", (f"+callbacks.x=[{value}]",))
    yield Case(f"{name} as logger", (f"+trainer.logger={value}",))
    yield Case(f"{name} in a list of loggers", (f"+trainer.logger=[{value}]",))
    yield Case(f"{name} as plugin", (f"+trainer.plugins=[{value}]",))
    yield Case(f"{name} as profiler", (f"+trainer.profiler={value}",))
    yield Case(f"{name} as strategy", (f"+trainer.strategy={value}",))
    yield Case(
        f"{name} in an encoder's settings", ("model=transformer", f"+model.settings.x={value}")
    )
    yield Case(f"{name} as model", ("model=evil",), {"model/evil.yaml": yaml.safe_dump(call)})
    yield Case(f"{name} as data", ("data=evil",), {"data/evil.yaml": yaml.safe_dump(call)})
    yield Case(f"{name} as optim", ("optim=evil",), {"optim/evil.yaml": yaml.safe_dump(call)})
    yield Case(f"{name} as task", ("task=evil",), {"task/evil.yaml": yaml.safe_dump(call)})
    for key in ("callbacks.x", "launcher.x", "sweeper.x"):
        words: tuple[str, ...] = () if key == "callbacks.x" else ("-m", "seed=0,1")
        yield Case(f"{name} as hydra.{key}", (*words, f"+hydra.{key}={value}"), is_whole=True)
    yield Case(f"{name} as launcher", ("-m", "seed=0,1", f"hydra.launcher={value}"), is_whole=True)
    yield Case(f"{name} as sweeper", ("-m", "seed=0,1", f"hydra.sweeper={value}"), is_whole=True)
    yield Case(f"{name} in a sweep", ("-m", "seed=0,1", f"+callbacks.x={value}"), is_whole=True)


def _hidden(call: Settings) -> Iterator[Case]:
    """The same call behind Hydra's own keys and OmegaConf's references."""
    target = call["_target_"]
    name = call["_target_"]
    rest = {key: value for key, value in call.items() if key != "_target_"}
    for key, value in (
        ("_partial_", True),
        ("_recursive_", False),
        ("_convert_", "all"),
        ("_convert_", "object"),
    ):
        yield _callback(f"{name} with {key}: {value}", {**call, key: value})
    word = f"+callbacks.x={as_value({'_target_': '${callbacks.y}', **rest})}"
    yield Case(f"{name} by reference", (f"+callbacks.y={target}", word))
    word = f"+callbacks.x={as_value({'_target_': '${name}', **rest})}"
    yield Case(
        f"{name} by the name of the run",
        ("+experiment=evil", word),
        {"experiment/evil.yaml": f"# @package _global_\nname: {target}\n"},
    )
    environment = {"FLATOUT_HOSTILE": target}
    for resolver in (
        "oc.env:FLATOUT_HOSTILE",
        "oc.decode:${oc.env:FLATOUT_HOSTILE}",
        "oc.env:NOWHERE,${callbacks.y}",
    ):
        settings = {"_target_": f"${{{resolver}}}", **rest}
        yield Case(
            f"{name} by {resolver}",
            (f"+callbacks.y={target}", f"+callbacks.x={as_value(settings)}"),
            environment=environment,
        )
    parts = target.rpartition(".")
    word = f"+callbacks.x={as_value({'_target_': '${callbacks.y}.' + parts[2], **rest})}"
    yield Case(f"{name} in two parts", (f"+callbacks.y={parts[0]}", word))
    whole = json.dumps(call)
    yield Case(
        f"{name} by oc.decode of the environment",
        ("+callbacks.x='${oc.decode:${oc.env:FLATOUT_HOSTILE}}'",),
        environment={"FLATOUT_HOSTILE": whole},
    )
    yield Case(
        f"{name} looked up twice",
        ("+callbacks.x='${oc.env:FLATOUT_HOSTILE}'",),
        environment={
            "FLATOUT_HOSTILE": "${oc.decode:${oc.env:FLATOUT_HOSTILE_TOO}}",
            "FLATOUT_HOSTILE_TOO": whole,
        },
    )
    yield Case(
        f"{name} by oc.create",
        (f"+callbacks.y={as_value(call)}", "+callbacks.x='${oc.create:${callbacks.y}}'"),
    )
    yield Case(
        f"{name} from the run's settings in Hydra's",
        (f"+callbacks.y={as_value(call)}", "+hydra.callbacks.x='${callbacks.y}'"),
        is_whole=True,
    )
    yield Case(
        f"{name} from the environment in Hydra's",
        ("+hydra.callbacks.x='${oc.decode:${oc.env:FLATOUT_HOSTILE}}'",),
        environment={"FLATOUT_HOSTILE": whole},
        is_whole=True,
    )


def _file(name: str, text: str, *words: str, is_whole: bool = True) -> Case:
    head = "" if text.startswith("# @") else "# @package _global_\n"
    return Case(
        name, ("+experiment=evil", *words), {"experiment/evil.yaml": head + text}, is_whole=is_whole
    )


def _of_files() -> Iterator[Case]:
    """What a file of somebody else's could try beyond a `_target_`."""
    for call in CALLS:
        text = yaml.safe_dump({"callbacks": {"x": call}})
        yield _file(f"{call['_target_']} in a file", text, is_whole=False)
        text = yaml.safe_dump({"hydra": {"callbacks": {"x": call}}})
        yield _file(f"{call['_target_']} in a file's hydra.callbacks", text)
        text = yaml.safe_dump({"hydra": {"sweeper": {"x": call}, "mode": "MULTIRUN"}})
        yield _file(f"{call['_target_']} in a file's hydra.sweeper", text)
        python = f"python/object/apply:{call['_target_']} ['<canary>']"
        yield _file(f"{call['_target_']} by YAML's own tags", f"seed: !!{python}\n")
    evil = "callbacks: {x: {_target_: evil.Evil}}\n"
    yield _file("a file that trusts a package", "allow_targets: [evil]\n" + evil)
    yield _file("a file that trusts everything", "allow_targets: [evil, os, builtins]\n" + evil)
    yield _file("a file that names an optimizer", "optim: {optimizer: evil.Evil}\n")
    yield _file(
        "a file that trusts its optimizer", "allow_targets: [evil]\noptim: {optimizer: evil.Evil}\n"
    )
    yield _file("an argument of an optimizer", "optim: {arguments: {x: {_target_: evil.Evil}}}\n")
    told = "hydra: {overrides: {task: ['allow_targets=[evil]']}}\n"
    yield _file("a file that says it was typed", "allow_targets: [evil]\n" + told + evil)
    yield _file(
        "a file that says so of Hydra", "hydra: {overrides: {hydra: ['hydra.job.env_set.A=1']}}\n"
    )
    yield _file(
        "a file that trusts for Hydra",
        "allow_targets: [evil]\nhydra: {callbacks: {x: {_target_: evil.Evil}}}\n",
    )
    yield _file(
        "a file with an environment", "hydra: {job: {env_set: {LD_PRELOAD: <bait>/evil.so}}}\n"
    )
    yield _file("a file that copies an environment", "hydra: {job: {env_copy: [HOME]}}\n")
    for key in (
        "python/name:evil.Evil",
        "python/module:evil",
        "python/object:evil.Evil",
        "python/object/new:evil.Evil",
    ):
        yield _file(f"YAML's tag {key}", f"seed: !!{key} {{}}\n")
    slurm = (
        "defaults:\n  - override /hydra/launcher: submitit_slurm\nhydra: {mode: MULTIRUN, launcher:"
        " %s}\n"
    )
    yield _file("a shell's commands for a cluster", slurm % "{setup: ['touch <canary>']}")
    yield _file("a scheduler's words", slurm % "{additional_parameters: {wrap: 'touch <canary>'}}")
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{after}: &{after} [{','.join([f'*{before}'] * 9)}]\n"
        for before, after in zip("abcdefgh", "bcdefghi", strict=True)
    )
    yield _file("a billion values", bomb)
    yield _file("a file that holds itself", "trainer: &a {x: [*a]}\n")
    yield _file("a file nested without end", "trainer: {x: " + "[" * 20_000 + "}\n")
    yield _file("a very long file", "seed: 0\n#" + "x" * 2_000_000 + "\n")


_LOGGINGS: list[Any] = [
    {"handlers": {"h": {"()": "logging.FileHandler", "filename": "<canary>"}}},
    {"handlers": {"h": {"()": "os.mkdir", "path": "<canary>"}}},
    {"handlers": {"h": {"()": "ext://os.mkdir", "path": "<canary>"}}},
    {"handlers": {"h": {"class": "logging.FileHandler", "filename": "<canary>"}}},
    {"handlers": {"h": {"class": "logging.handlers.RotatingFileHandler", "filename": "<canary>"}}},
    {"handlers": {"h": {"class": "evil.Evil"}}},
    {"handlers": {"h": {"class": "logging.StreamHandler", "stream": "ext://evil.Evil"}}},
    {"formatters": {"f": {"()": "evil.Evil"}}},
    {"formatters": {"f": {"class": "evil.Evil"}}},
    {"filters": {"f": {"()": "evil.Evil"}}},
    {"handlers": {"h": {"class": "${oc.env:FLATOUT_HOSTILE}"}}},
]
"""Settings of Python's logging, which calls what they name."""


def _of_hydra() -> Iterator[Case]:
    """What Hydra does by itself."""
    for number, logging in enumerate(_LOGGINGS):
        roots = {
            "version": 1,
            "root": {"handlers": list(logging.get("handlers", {}))},
            **logging,
        }
        for group in ("job_logging", "hydra_logging"):
            name = f"{group} {number}: {next(iter(logging))}"
            text = yaml.safe_dump(roots)
            words = (f"hydra/{group}=evil",)
            yield Case(
                name,
                words,
                {f"hydra/{group}/evil.yaml": text},
                {"FLATOUT_HOSTILE": "evil.Evil"},
                is_whole=True,
            )
    for path in ("pkg://evilpackage", "pkg:evilpackage", "PKG://evilpackage", "pkg://evil"):
        yield Case(
            f"settings looked for in {path}", (f"hydra.searchpath=['{path}']",), is_whole=True
        )
    yield Case("settings of a package", ("--config-path", "pkg://evilpackage"), is_whole=True)
    yield Case("settings of a package, short", ("-cp", "pkg://evilpackage"), is_whole=True)
    yield Case("settings of a package, with =", ("--config-path=pkg://evilpackage",), is_whole=True)
    yield Case(
        "a pickle that is run again",
        ("--experimental-rerun", "<bait>/payload.pickle"),
        is_whole=True,
    )
    yield Case("a pickle, the option cut short", ("--exp", "<bait>/payload.pickle"), is_whole=True)
    yield Case("a pickle, with =", ("--experimental-rerun=<bait>/payload.pickle",), is_whole=True)
    for name in ("attn_implementation", "_attn_implementation", "auto_map"):
        setting = f"+model.settings.{name}='somebody/kernels'"
        yield Case(f"code by the setting {name}", ("model=transformer", setting), is_whole=True)
    for searched in ("choice(os.mkdir,os.makedirs)", "choice(evil.Evil,evil.call)"):
        yield Case(
            f"a sweep of {searched}",
            (
                "-m",
                "hydra/sweeper=flatout",
                f"+callbacks.x._target_={searched}",
                "+callbacks.x._args_=['<canary>']",
            ),
            is_whole=True,
        )
    yield Case(
        "a sweep of targets", ("-m", "+callbacks.x._target_=evil.Evil,evil.call"), is_whole=True
    )


def all_cases() -> list[Case]:
    """Every case, those that matter most first."""
    found = [_callback(each["_target_"], each) for each in FUNCTIONS]
    found += [_callback(f"importing {name}", {"_target_": name}) for name in IMPORTED]
    found += [_callback(f"{each['_target_']} {list(each)[1:]}", each) for each in LEADING_OUT]
    found += [_callback(f"the odd name {name!r}", {"_target_": name}) for name in ODD_NAMES]
    for call in CALLS:
        found += [*_in_places(call), *_hidden(call)]
    return [*found, *_of_files(), *_of_hydra()]


def quick_cases() -> list[Case]:
    """A part of them: each way and each place once. `tests/soak` tries all."""
    found = [_callback(each["_target_"], each) for each in FUNCTIONS[::16]]
    found += [_callback(f"importing {name}", {"_target_": name}) for name in IMPORTED[1::4]]
    found += [_callback(f"{each['_target_']} {list(each)[1:]}", each) for each in LEADING_OUT[::8]]
    found += [_callback(f"the odd name {name!r}", {"_target_": name}) for name in ODD_NAMES[::12]]
    found += [*_in_places(CALLS[2]), *_hidden(CALLS[0])]
    return [*found, *list(_of_files())[::4], *list(_of_hydra())[::8]]
