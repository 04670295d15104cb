"""A search from Python: Optuna asks, `fit` answers. `python examples/sweep.py [rows]`.

`python -m flatout sweep` does the same with a process for each trial, pruning, resume and a page of
results.
"""

import sys

import optuna

from flatout import BiLSTMConfig, HeadlinesConfig, MonitorConfig, OptimConfig, TextDataConfig, fit


def main(rows: int = 4_000, trials: int = 6) -> float:
    data = TextDataConfig(sample=HeadlinesConfig(rows=rows, eval_rows=rows // 5, classes=6))

    def objective(trial: optuna.Trial) -> float:
        model = BiLSTMConfig(hidden=trial.suggest_categorical("hidden", [32, 64]))
        optim = OptimConfig(lr=trial.suggest_float("lr", 1e-3, 1e-2, log=True))
        quiet = MonitorConfig(verdict=False, progress=False)
        return fit(data, model, optim=optim, epochs=2, monitor=quiet, name="sweep").objective

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=trials)
    print(f"best {study.best_value:.3f} with {study.best_params}")
    return study.best_value


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
