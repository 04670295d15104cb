"""Parts of flatout in a plain `L.Trainer`: no Hydra, no run folder.

`python examples/plain_lightning.py [rows]`.
"""

import sys

import lightning as L

from flatout import BiLSTMConfig, HeadlinesConfig, OptimConfig
from flatout.callbacks import StepTimer, Throughput
from flatout.data import TextData
from flatout.engine import FastLoop
from flatout.tasks import Classifier


def main(rows: int = 20_000) -> float:
    # A table of yours: TextData(source="news.csv", text="title", label="topic")
    data = TextData(sample=HeadlinesConfig(rows=rows, eval_rows=rows // 10), batch_size=64)
    model = Classifier(BiLSTMConfig(hidden=64), optim=OptimConfig(lr=3e-3))
    trainer = L.Trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[StepTimer(), Throughput(), FastLoop()],  # each alone, and each can be left out
        enable_checkpointing=False,
        log_every_n_steps=10,
    )
    trainer.fit(model, datamodule=data)
    (metrics,) = trainer.test(model, datamodule=data)
    answers = trainer.predict(model, datamodule=data)
    print(f"answers for {sum(len(each['rows']) for each in answers)} rows")
    return metrics["test/accuracy"]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
