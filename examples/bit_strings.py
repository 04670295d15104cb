"""What do Bloom filters of names give away?

Train a reader on made-up people. `python examples/bit_strings.py`.
"""

import sys

from flatout import (
    BitMLPConfig,
    BitsDataConfig,
    EncodingConfig,
    GramsConfig,
    OptimConfig,
    PeopleConfig,
    fit,
)


def main(rows: int = 20_000) -> float:
    # Records of yours: BitsDataConfig(source="people.csv"), plain columns first, then bloomfilter,
    # then uid.
    data = BitsDataConfig(
        sample=PeopleConfig(rows=rows), encoding=EncodingConfig(size=1024, hashes=10)
    )
    result = fit(
        data,
        BitMLPConfig(),
        # the report needs some records to be worth reading
        task=GramsConfig(exposure=rows >= 5_000),
        optim=OptimConfig(lr=5e-3),
        epochs=8,
        name="bit_strings",
    )
    print(f"Dice of unseen people {result.metrics['test/dice']:.3f}, report in {result.folder}")
    return result.metrics["test/dice"]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
