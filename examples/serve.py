"""A finished run behind an HTTP address (extra `serve`). `python examples/serve.py RUN [--exact]`,
then elsewhere

curl localhost:8000/predict -H 'content-type: application/json' -d '{"texts": ["senate votes on the
treaty"]}'
"""

import argparse
import asyncio
from concurrent.futures import Future
from dataclasses import asdict, replace
from itertools import islice
from queue import SimpleQueue
from threading import Thread
from typing import Annotated, Any

import uvicorn
from fastapi import Body, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, StringConstraints
from starlette.requests import ClientDisconnect

from flatout import Predictor, UserError

MOST_BYTES = 4_000_000
MOST_TEXTS = 512
MOST_CHARACTERS = 100_000
MOST_SECONDS = 10
Text = Annotated[
    str,
    StringConstraints(max_length=MOST_CHARACTERS),
    # JSON may hold half a character: it is refused
    AfterValidator(lambda text: text.encode().decode()),
]


def answer_waiting(predictor: Any, waiting: SimpleQueue, counts: dict[str, int]) -> None:
    """While a batch is computed, requests wait; then all that wait are the next batch."""
    while True:
        taken = [waiting.get()]
        while not waiting.empty() and sum(len(texts) for texts, _ in taken) < MOST_TEXTS:
            taken.append(waiting.get())
        try:
            answers = iter(predictor.predict([text for texts, _ in taken for text in texts]))
            for texts, future in taken:
                future.set_result(list(islice(answers, len(texts))))
            counts["texts"] += sum(len(texts) for texts, _ in taken)
            if predictor.unlike is not None:
                counts["unlike"] += int((predictor.unlike > 1).sum())
                predictor.unlike = None
        except Exception as error:
            # of any class: else this thread ends, and every later request waits for ever
            for _, future in taken:
                future.set_exception(error)


def make_app(run: Any, *, exact: bool = False) -> FastAPI:
    """An app with two addresses, `/predict` and `/counts`."""
    app = FastAPI(title="flatout")
    waiting = SimpleQueue()
    counts = {"texts": 0, "unlike": 0}  # answered, and unlike the training texts
    predictor = replace(Predictor.load(run), exact=exact)
    Thread(target=answer_waiting, args=(predictor, waiting, counts), daemon=True).start()

    @app.middleware("http")
    async def limit(request: Request, answer: Any) -> Any:
        size = request.headers.get("content-length", "0" if request.method == "GET" else "")
        # a body in chunks has no size, whatever the other header says
        is_sized = size.isdecimal() and "transfer-encoding" not in request.headers
        if not is_sized or int(size) > MOST_BYTES:
            return Response(f"more than {MOST_BYTES:,} bytes", 413)
        try:
            await asyncio.wait_for(request.body(), MOST_SECONDS)
        except (TimeoutError, ClientDisconnect):
            message = f"no whole body in {MOST_SECONDS} s"
            return Response(message, 408, headers={"connection": "close"})
        return await answer(request)

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: RequestValidationError) -> Response:
        # without the texts
        return Response("\n".join(problem["msg"] for problem in error.errors()), 422)

    @app.post("/predict")
    def predict(
        texts: Annotated[list[Text], Body(embed=True, max_length=MOST_TEXTS)],
    ) -> list[dict[str, Any]]:
        waiting.put((texts, future := Future()))
        return list(map(asdict, future.result()))

    @app.get("/counts")
    def count() -> dict[str, int]:
        return counts

    return app


def main(words: list[str] | None = None) -> None:
    """Serve the run that the command names; a mistake is one sentence, with exit code 2."""
    parser = argparse.ArgumentParser(description="A finished run on texts at localhost:8000.")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--exact", action="store_true")
    arguments = parser.parse_args(words)
    try:
        app = make_app(arguments.run, exact=arguments.exact)
    except UserError as mistake:
        parser.exit(2, f"{mistake}\n")
    uvicorn.run(app, host="127.0.0.1", port=8000)


if __name__ == "__main__":
    main()
