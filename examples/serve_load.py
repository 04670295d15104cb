"""Requests to `examples/serve.py`, many at a time: how fast they are answered, and whether as
`predict` answers.

`python examples/serve_load.py RUN`, while `python examples/serve.py RUN` runs in another terminal
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import numpy as np

from flatout import load_predictor
from flatout.data.samples.headlines import HeadlinesConfig, HeadlinesTable

CLIENTS = (1, 4, 16)
ROUNDS = 3


def ask(port: int, text: str) -> tuple[float, Any]:
    """Seconds of one request of one text, and its answer."""
    began = time.perf_counter()
    connection = HTTPConnection("127.0.0.1", port)
    connection.request(
        "POST", "/predict", json.dumps({"texts": [text]}), {"content-type": "application/json"}
    )
    (answer,) = json.loads(connection.getresponse().read())
    connection.close()
    return time.perf_counter() - began, answer


def main(run: str, port: int = 8000, rows: int = 400) -> None:
    blocks = HeadlinesTable(HeadlinesConfig(eval_rows=rows), "test").blocks(["text"])
    texts = [text for block in blocks for text in block.column("text").to_pylist()]
    expected = [answer.label for answer in load_predictor(run).predict(texts)]
    for clients in CLIENTS:
        with ThreadPoolExecutor(clients) as pool:
            # the first requests warm up
            list(pool.map(lambda text: ask(port, text), texts[: 4 * clients]))
            began = time.perf_counter()
            found = [
                each
                for _ in range(ROUNDS)
                for each in pool.map(lambda text: ask(port, text), texts)
            ]
            took = time.perf_counter() - began
        p50, p99 = np.quantile([seconds for seconds, _ in found], [0.5, 0.99]) * 1e3
        same = sum(
            answer["label"] == label
            for (_, answer), label in zip(found, ROUNDS * expected, strict=True)
        )
        rate = f"{len(found) / took:,.0f} requests/s, p50 {p50:.1f} ms, p99 {p99:.1f} ms"
        print(f"{clients} at once: {rate}; as predict answers: {same:,} of {len(found):,}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
