"""The claims that can be measured here, by name; each module has `claims(options) ->
Iterator[Claim]`.
"""

BENCHES = {
    "spine": "data: batches a second, waiting, framework cost, padding, ten million rows",
    "shortcuts": "what each shortcut through Lightning saves of a step",
    "operators": "what a step of a small model asks a GPU for, by phase; counted on any machine",
    "shapes": "captured steps: how many shapes batches are brought to, and the padding they add",
    "sources": "tables: reading and checking against reading alone, rows a second, memory, splits",
    "headlines": "a BiLSTM's epochs against the usual loop, at the same accuracy",
    "bits": (
        "bit strings: preparing, training, memory, scores, rebuilt texts (--data for published"
        " people)"
    ),
    "sequences": (
        "recordings: epochs against the usual loop, memory of windows, errors on real data (--data)"
    ),
    "loaders": (
        "windows: batches a second, memory and training against the loaders of pytorch-forecasting"
        " and darts"
    ),
    "bert": (
        "encoders: flat equals padded in every family; speed against the Trainer; published sizes"
        " (--only sizes)"
    ),
    "answers": (
        "faults that verify finds, exact answers and their price, predict against a pipeline"
    ),
    "abstention": (
        "predict --at-error: errors of given answers on fresh rows (--data for published sets)"
    ),
    "drift": "predict: files from elsewhere that are named, and others (--data for published sets)",
    "audit": (
        "planted wrong labels, forecasts of more rows, false alarms, intervals, cost (--data for"
        " published sets)"
    ),
    "reuse": (
        "frozen layers computed once: epochs, a sweep, memory, the Trainer; scores of cuts (--data,"
        " --pretrained)"
    ),
    "gpu": (
        "a card: kernels, steps that never wait, whole runs in three precisions, speed, ranks on"
        " two cards"
    ),
    "rates": "a card: tokens or rows a second of six trainings, a row of docs/card_rates.md",
    "price": (
        "runs that are priced and trained: error, intervals, memory (--data for published sets)"
    ),
    "tune": "what tune=auto chooses against what is set, and what choosing takes",
    "scale": (
        "two processes against one, balance of ranks, what trials cost, a sweep that is crashed and"
        " killed"
    ),
    "cluster": (
        "stores built in parts: the same bytes, what parts cost, memory; plans of a billion rows"
    ),
    "doctor": (
        "bottlenecks planted into runs: whether the verdict names them, and what its fixes are"
        " worth"
    ),
    "doctor_run": (
        "doctor run: bottlenecks planted into scripts of Lightning and transformers, and the gate"
        " for CI"
    ),
    "protections": "what the protections of a run cost: their part of each step and of each save",
    "defaults": (
        "first runs: a BiLSTM, or an encoder (--pretrained), with nothing set against its rival"
        " (needs --data)"
    ),
    "quality": (
        "scores on published data sets (needs --data), from scratch or of an encoder (--pretrained)"
    ),
}
