"""What a `_target_` could name: functions, imports, ways out and odd names, none to be executed."""

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]

FUNCTIONS: list[Settings] = [
    {"_target_": "os.system", "_args_": ["touch <canary>"]},
    {"_target_": "os.popen", "_args_": ["touch <canary>"]},
    {"_target_": "os.mkdir", "_args_": ["<canary>"]},
    {"_target_": "os.makedirs", "name": "<canary>"},
    {"_target_": "os.mkfifo", "_args_": ["<canary>"]},
    {"_target_": "os.symlink", "_args_": ["/", "<canary>"]},
    {"_target_": "os.link", "_args_": ["<bait>/evil.py", "<canary>"]},
    {"_target_": "os.rename", "_args_": ["<bait>/spare", "<canary>"]},
    {"_target_": "posix.mkdir", "_args_": ["<canary>"]},
    {"_target_": "posix.system", "_args_": ["touch <canary>"]},
    {"_target_": "subprocess.run", "_args_": [["touch", "<canary>"]]},
    {"_target_": "subprocess.call", "_args_": [["touch", "<canary>"]]},
    {"_target_": "subprocess.check_output", "_args_": [["touch", "<canary>"]]},
    {"_target_": "subprocess.getoutput", "_args_": ["touch <canary>"]},
    {"_target_": "subprocess.Popen", "_args_": [["touch", "<canary>"]]},
    {"_target_": "pty.spawn", "_args_": [["touch", "<canary>"]]},
    {"_target_": "builtins.open", "_args_": ["<canary>", "w"]},
    {"_target_": "builtins.eval", "_args_": ["open('<canary>', 'w')"]},
    {"_target_": "builtins.exec", "_args_": ["open('<canary>', 'w')"]},
    {"_target_": "builtins.__import__", "_args_": ["evil"]},
    {"_target_": "io.open", "_args_": ["<canary>", "w"]},
    {"_target_": "io.FileIO", "_args_": ["<canary>", "w"]},
    {"_target_": "codecs.open", "_args_": ["<canary>", "w"]},
    {"_target_": "gzip.open", "_args_": ["<canary>", "w"]},
    {"_target_": "zipfile.ZipFile", "_args_": ["<canary>", "w"]},
    {"_target_": "tarfile.open", "_args_": ["<canary>", "w"]},
    {"_target_": "sqlite3.connect", "_args_": ["<canary>"]},
    {"_target_": "shelve.open", "_args_": ["<canary>"]},
    {"_target_": "logging.FileHandler", "filename": "<canary>"},
    {"_target_": "logging.basicConfig", "filename": "<canary>", "force": True},
    {"_target_": "shutil.copy", "_args_": ["<bait>/evil.py", "<canary>"]},
    {"_target_": "shutil.copytree", "_args_": ["<bait>", "<canary>"]},
    {"_target_": "shutil.move", "_args_": ["<bait>/spare", "<canary>"]},
    {
        "_target_": "pathlib.Path.touch",
        "_args_": [{"_target_": "pathlib.Path", "_args_": ["<canary>"]}],
    },
    {
        "_target_": "pathlib.Path.mkdir",
        "_args_": [{"_target_": "pathlib.Path", "_args_": ["<canary>"]}],
    },
    {"_target_": "importlib.import_module", "_args_": ["evil"]},
    {"_target_": "runpy.run_path", "_args_": ["<bait>/evil.py"]},
    {"_target_": "runpy.run_module", "_args_": ["evil"]},
    {"_target_": "pydoc.locate", "_args_": ["evil.Evil"]},
    {"_target_": "pkgutil.resolve_name", "_args_": ["evil:Evil"]},
    {"_target_": "timeit.timeit", "_args_": ["open('<canary>', 'w')"], "number": 1},
    {"_target_": "cProfile.run", "_args_": ["open('<canary>', 'w')"]},
    {"_target_": "functools.partial", "_args_": [{"_target_": "os.mkdir", "_args_": ["<canary>"]}]},
    {
        "_target_": "hydra.utils.instantiate",
        "_args_": [{"_target_": "os.mkdir", "_args_": ["<canary>"]}],
    },
    {"_target_": "hydra.utils.call", "_args_": [{"_target_": "os.mkdir", "_args_": ["<canary>"]}]},
    {"_target_": "hydra.utils.get_class", "path": "evil.Evil"},
    {"_target_": "hydra.utils.get_method", "path": "evil.call"},
    {"_target_": "hydra.utils.get_object", "path": "evil.Evil"},
    {"_target_": "omegaconf.OmegaConf.save", "_args_": [{"a": 1}, "<canary>"]},
    {"_target_": "joblib.load", "_args_": ["<bait>/payload.pickle"]},
    {"_target_": "pandas.read_pickle", "_args_": ["<bait>/payload.pickle"]},
    {"_target_": "numpy.load", "_args_": ["<bait>/payload.pickle"], "allow_pickle": True},
    {"_target_": "numpy.savetxt", "_args_": ["<canary>", [1]]},
    {
        "_target_": "numpy.memmap",
        "filename": "<canary>",
        "mode": "w+",
        "shape": [1],
    },
    {"_target_": "torch.load", "_args_": ["<bait>/payload.pt"], "weights_only": False},
    {
        "_target_": "torch.serialization.load",
        "_args_": ["<bait>/payload.pt"],
        "weights_only": False,
    },
    {"_target_": "torch.save", "_args_": [1, "<canary>"]},
    {
        "_target_": "torch.from_file",
        "_args_": ["<canary>"],
        "shared": True,
        "size": 4,
    },
    {"_target_": "torch.hub.load", "_args_": ["<bait>", "call"], "source": "local"},
    {"_target_": "torch.utils.tensorboard.SummaryWriter", "log_dir": "<canary>"},
    {"_target_": "torch.package.PackageExporter", "_args_": ["<canary>"]},
    {"_target_": "torch.os.mkdir", "_args_": ["<canary>"]},
    {"_target_": "torch.os.system", "_args_": ["touch <canary>"]},
    {"_target_": "torch.serialization.os.mkdir", "_args_": ["<canary>"]},
    {"_target_": "torch.nn.modules.module.torch.save", "_args_": [1, "<canary>"]},
    {"_target_": "torch.utils.data.dataset.torch.save", "_args_": [1, "<canary>"]},
    {"_target_": "torch.optim.optimizer.torch.save", "_args_": [1, "<canary>"]},
    {"_target_": "torch.utils.data.datapipes.utils.common.os.mkdir", "_args_": ["<canary>"]},
    {"_target_": "lightning.pytorch.trainer.trainer.os.mkdir", "_args_": ["<canary>"]},
    {
        "_target_": "lightning.pytorch.callbacks.model_checkpoint.shutil.copy",
        "_args_": ["<bait>/evil.py", "<canary>"],
    },
    {"_target_": "lightning.pytorch.callbacks.model_checkpoint.os.mkdir", "_args_": ["<canary>"]},
    {"_target_": "lightning.pytorch.loggers.csv_logs.os.mkdir", "_args_": ["<canary>"]},
    {"_target_": "lightning.pytorch.loggers.csv_logs.ExperimentWriter", "log_dir": "<canary>"},
    {
        "_target_": "lightning.pytorch.LightningModule.load_from_checkpoint",
        "_args_": ["<bait>/payload.pt"],
    },
    {
        "_target_": "lightning.fabric.utilities.cloud_io._load",
        "_args_": ["<bait>/payload.pt"],
        "weights_only": False,
    },
    {
        "_target_": "lightning.fabric.utilities.cloud_io._atomic_save",
        "_args_": [{"a": 1}, "<canary>"],
    },
    {"_target_": "lightning.pytorch.utilities.migration.utils.os.mkdir", "_args_": ["<canary>"]},
    {"_target_": "transformers.utils.importlib.import_module", "_args_": ["evil"]},
    {"_target_": "transformers.utils.import_utils.importlib.import_module", "_args_": ["evil"]},
    {"_target_": "transformers.utils.hub.os.mkdir", "_args_": ["<canary>"]},
    {"_target_": "transformers.activations.torch.save", "_args_": [1, "<canary>"]},
    {
        "_target_": "transformers.AutoConfig.from_pretrained",
        "_args_": ["<bait>/remote"],
        "trust_remote_code": True,
    },
    {
        "_target_": "transformers.AutoModel.from_pretrained",
        "_args_": ["<bait>/remote"],
        "trust_remote_code": True,
    },
    {
        "_target_": "transformers.dynamic_module_utils.get_class_from_dynamic_module",
        "_args_": ["configuration_evil.EvilConfig", "<bait>/remote"],
    },
    {"_target_": "torchmetrics.metric.torch.save", "_args_": [1, "<canary>"]},
    {"_target_": "flatout.run.resolve.os.mkdir", "_args_": ["<canary>"]},
    {"_target_": "flatout.checkpoints.exact.shutil.copy", "_args_": ["<bait>/evil.py", "<canary>"]},
    {
        "_target_": "flatout.models.words.Path.touch",
        "_args_": [{"_target_": "pathlib.Path", "_args_": ["<canary>"]}],
    },
    {"_target_": "flatout.files.write_atomically", "path": "<canary>", "text": "x"},
    {
        "_target_": "flatout.__main__.main",
        "_args_": [["sweep", "+hydra.callbacks.x._target_=evil.Evil"]],
    },
    {"_target_": "train.main", "_args_": [["--experimental-rerun", "<bait>/payload.pickle"]]},
]
"""Functions, and classes of other kinds, with arguments that make the canary; many by way of a
trusted package."""

IMPORTED = [
    "evil.Evil",
    "evil.call",
    "evilpackage.Evil",
    "evilpackage.inner.Evil",
    "evilpackage.inner.call",
]
"""Names in packages that make the canary when they are merely imported."""

LEADING_OUT: list[Settings] = [
    {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": "<canary>"},
    {"_target_": "lightning.pytorch.loggers.CSVLogger", "_args_": ["<canary>"]},
    {"_target_": "lightning.pytorch.loggers.TensorBoardLogger", "save_dir": "<canary>"},
    {"_target_": "lightning.pytorch.loggers.MLFlowLogger", "tracking_uri": "file:<canary>"},
    {
        "_target_": "lightning.pytorch.loggers.WandbLogger",
        "save_dir": "<canary>",
        "offline": True,
    },
    {"_target_": "lightning.pytorch.loggers.CometLogger", "online": False},
    {"_target_": "lightning.pytorch.callbacks.OnExceptionCheckpoint", "dirpath": "<canary>"},
    {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "dirpath": "<canary>"},
    {"_target_": "lightning.pytorch.callbacks.SpikeDetection", "exclude_batches_path": "<canary>"},
    {"_target_": "lightning.pytorch.callbacks.LambdaCallback"},
    {"_target_": "lightning.pytorch.demos.boring_classes.BoringModel"},
    {"_target_": "lightning.pytorch.demos.WikiText2", "data_dir": "<canary>"},
    {"_target_": "lightning.pytorch.serve.ServableModuleValidator"},
    {"_target_": "flatout.checkpoints.exact.ExactCheckpoint", "folder": "<canary>"},
    {"_target_": "benchmarks.scale.Planted", "crash": 0, "hang": 0},
    {"_target_": "torch.jit.ScriptModule"},
    {"_target_": "torch.jit._script.RecursiveScriptModule", "_args_": [None]},
    {"_target_": "torch.fx.GraphModule", "root": {}, "graph": None},
    {
        "_target_": "torch.distributed.nn.RemoteModule",
        "remote_device": "x",
        "module_cls": "y",
    },
    {"_target_": "torch.utils.data.datapipes.iter.FileOpener", "_args_": [["/etc/passwd"]]},
    {"_target_": "torch.utils.data.datapipes.iter.FileLister", "_args_": ["/"]},
    {"_target_": "torchmetrics.text.BERTScore"},
    {"_target_": "torchmetrics.text.InfoLM"},
    {"_target_": "torchmetrics.text.ROUGEScore"},
    {"_target_": "torchmetrics.text.SacreBLEUScore"},
    {"_target_": "torchmetrics.text._deprecated._SacreBLEUScore"},
    {"_target_": "torchmetrics.image.FrechetInceptionDistance"},
    {
        "_target_": (
            "transformers.models.bert.convert_bert_original_tf_checkpoint_to_pytorch"
            ".BertForPreTraining"
        )
    },
]
"""Classes of the right kind that open files, write elsewhere, fetch something or listen."""

ODD_NAMES: list[Any] = [
    "os",
    "system",
    "",
    " ",
    ".os.system",
    "os..system",
    "torch..nn.Linear",
    "torch.nn.Linear.",
    "torch.nn.Linear ",
    "torch.nn:Linear",
    "torch/nn/Linear",
    "tоrch.nn.Linear",  # the second letter is Cyrillic
    "torch.nn.Linear\n",
    "torch.nn.Linear.__init__",
    "torch.nn.Linear.__class__",
    "torch.nn.Module.__subclasses__",
    "torch.nn.Module.load_state_dict",
    "__main__.os.system",
    "torch.__builtins__.eval",
    "flatout.__loader__.exec_module",
    "lightning.pytorch.callbacks.__builtins__",
    "../evil.Evil",
    "evil.py",
    7,
    None,
    True,
    ["os.system"],
    {"name": "os.system"},
]
"""What is no name, or only looks like one that may be given."""

CALLS: list[Settings] = [FUNCTIONS[2], FUNCTIONS[10], FUNCTIONS[16], FUNCTIONS[28]]
"""A few of those above, to be put everywhere."""
