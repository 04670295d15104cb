"""Rows from Python, without a file: a mapping of columns for each split.

`python examples/own_data.py`.
"""

import random
import sys

from flatout import TextCNNConfig, TextDataConfig, fit

WORDS = {
    "sport": ["goal", "match", "team", "coach"],
    "politics": ["vote", "law", "party", "senate"],
    "science": ["cell", "atom", "star", "gene"],
}


def make_rows(count: int, seed: int) -> dict[str, list[str]]:
    """Texts of common words and one word of their topic.

    A pandas or pyarrow table serves as well.
    """
    numbers = random.Random(seed)  # noqa: S311 - made-up rows, no secret
    topics = numbers.choices(list(WORDS), k=count)
    texts = [
        " ".join([f"w{numbers.randrange(50)}" for _ in range(6)] + numbers.sample(WORDS[each], 1))
        for each in topics
    ]
    return {"text": [f"{text} {number}" for number, text in enumerate(texts)], "label": topics}


def main(rows: int = 3_000) -> float:
    data = TextDataConfig(
        train=make_rows(rows, 0), validation=make_rows(rows // 5, 1), test=make_rows(rows // 5, 2)
    )
    result = fit(data, TextCNNConfig(filters=32), epochs=3, name="own_data")
    for prediction in result.predict(["w1 w2 goal", "the party of w3"]):
        print(prediction)
    return result.metrics["test/accuracy"]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
