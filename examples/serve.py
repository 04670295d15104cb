"""A finished run behind an HTTP address (extra `serve`). `python examples/serve.py RUN`, then in another terminal

curl localhost:8000/predict -H 'content-type: application/json' -d '{"texts": ["senate votes on the treaty"]}'
"""

import sys
from pathlib import Path
from threading import Lock

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, Field

from flatout import load_predictor


class Question(BaseModel):
    texts: list[str] = Field(max_length=512)


class Answer(BaseModel):
    label: str | float | list[str]
    probability: float | list[float] | None


def make_app(run: str | Path) -> FastAPI:
    """An app with one address, `/predict`."""
    predictor, one_at_a_time = load_predictor(run), Lock()
    app = FastAPI(title="flatout")

    @app.post("/predict")
    def predict(question: Question) -> list[Answer]:
        with one_at_a_time:  # a model answers a batch at a time; other requests wait
            answers = predictor.predict(question.texts)
        return [Answer(label=each.label, probability=each.probability) for each in answers]

    return app


if __name__ == "__main__":
    uvicorn.run(make_app(sys.argv[1]), host="127.0.0.1", port=8000)
