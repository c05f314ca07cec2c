"""`hedgerow eval`: does what is served still write working code, and the same with trees as without?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from hedgerow import strict_json
from hedgerow.cli.command import FAILED, Command, say
from hedgerow.cli.evaluation import report
from hedgerow.cli.evaluation.endpoint import Endpoint
from hedgerow.cli.evaluation.run import PLAIN, TREES, Asks, evaluate, through_http, through_sdk
from hedgerow.cli.evaluation.sandbox import Limits, prove
from hedgerow.cli.evaluation.task import Task
from hedgerow.cli.evaluation.tasks import TASKS
from hedgerow.client import Client, Options
from hedgerow.client._environment import api_key
from hedgerow.errors import InvalidRequest, NotFound

MOST_PARALLEL = 64
SERVED = "served"  # the one way of an endpoint that was not told how to decode plainly


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is asked, whom, and how the answers are judged."""
    parser.add_argument("--model", metavar="NAME", default="", help="one of `hedgerow models`, or the endpoint's name")
    parser.add_argument("--completion", action="store_true", help="continue the code, for base models; else by chat")
    parser.add_argument("--no-thinking", action="store_true", help="without reasoning, where the template has it")
    parser.add_argument("--max-tokens", type=int, default=4096, metavar="N", help="of an answer, %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="smallest set of tokens that reaches P")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of sampled answers, %(default)s")
    parser.add_argument("--budget", type=int, metavar="N", help="most nodes of a tree; the model's default")
    parser.add_argument("--task", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--parallel", type=int, default=4, metavar="N", help="questions at a time, %(default)s")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of an answer, %(default)g")
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="an answer's code may run, %(default)g"
    )
    parser.add_argument(
        "--endpoint", metavar="URL", help="ask this OpenAI-compatible API (http://HOST:PORT/v1) instead of a gateway"
    )
    parser.add_argument("--body", metavar="JSON", help="with --endpoint: fields to add to every request")
    parser.add_argument("--plain-body", metavar="JSON", help="with --endpoint: fields that ask it for plain decoding")
    parser.add_argument("--json", action="store_true", help="one JSON object, with the answers' texts")
    parser.add_argument(
        "--without-isolation", action="store_true", help="run a model's code here although nothing holds it"
    )


def run(client: Client, args: argparse.Namespace) -> int:
    """0: asked and judged. 1: a question had no answer, or trees and plain decoding differ."""
    tasks, limits = _tasks(args), _limits(args)
    ways = _http(args) if args.endpoint else _sdk(client, args)
    if args.without_isolation:
        say("hedgerow eval: WARNING: code that a model wrote runs here with your rights, and nothing holds it")
    layers = () if args.without_isolation else prove()
    served = args.model if args.endpoint else _served(client, args)
    rows = evaluate(
        tasks, ways, completion=args.completion, limits=limits, isolate=not args.without_isolation,
        parallel=args.parallel,
    )  # fmt: skip
    about = {
        "asked": args.endpoint or args.address,
        "model": served,
        "prompts": "completion" if args.completion else "chat",
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "isolation": ", ".join(layers) or "NONE",
    }
    print(json.dumps(report.as_json(rows, about)) if args.json else report.as_text(rows, about))
    same, missing = report.same(rows), report.unanswered(rows)
    if missing:
        say(f"hedgerow eval: {missing} questions had no answer")
    return FAILED if missing or (same is not None and same["same"] < same["compared"]) else 0


def _tasks(args: argparse.Namespace) -> list[Task]:
    known = {task.name: task for task in TASKS}
    for name in args.task or ():
        if name not in known:
            raise InvalidRequest("--task", name, f"one of {', '.join(known)}")
    return [known[name] for name in args.task] if args.task else list(TASKS)


def _limits(args: argparse.Namespace) -> Limits:
    if not 0.1 <= args.seconds <= 600:
        raise InvalidRequest("--seconds", args.seconds, "in [0.1, 600]")
    if not 1 <= args.parallel <= MOST_PARALLEL:
        raise InvalidRequest("--parallel", args.parallel, f"in [1, {MOST_PARALLEL}]")
    if not args.timeout > 0:
        raise InvalidRequest("--timeout", args.timeout, "above 0")
    return Limits(seconds=args.seconds)


def _served(client: Client, args: argparse.Namespace) -> str:
    """The model and its fingerprint; asked before any question, so that a gateway that is not there is told of once."""
    models = client.models()
    for model in models:
        if args.model == model.name or (not args.model and len(models) == 1):
            return f"{model.name} {model.fingerprint[:12]}".rstrip()
    if not args.model:
        raise InvalidRequest("--model", "", f"one of {', '.join(model.name for model in models)}")
    raise NotFound("model", args.model)


def _sdk(client: Client, args: argparse.Namespace) -> Mapping[str, Asks]:
    if args.body or args.plain_body:
        raise InvalidRequest("--body", args.body or args.plain_body, "given with --endpoint only")
    options = Options(
        max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed, timeout=args.timeout,
    )  # fmt: skip
    if args.model:
        options["model"] = args.model
    if args.top_p is not None:
        options["top_p"] = args.top_p
    trees = Options(**options)
    if args.budget is not None:
        trees["budget"] = args.budget
    plain = Options(**options, budget=0)
    thinking = False if args.no_thinking else None
    return {
        way: through_sdk(client, given, completion=args.completion, thinking=thinking)
        for way, given in ((TREES, trees), (PLAIN, plain))
    }


def _http(args: argparse.Namespace) -> Mapping[str, Asks]:
    if args.budget is not None:
        raise InvalidRequest("--budget", args.budget, "given to a gateway; an endpoint takes --body and --plain-body")
    endpoint = Endpoint(args.endpoint, args.model, api_key(None), args.timeout)
    fields: dict[str, Any] = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
    if args.top_p is not None:
        fields["top_p"] = args.top_p
    if args.no_thinking:
        fields["chat_template_kwargs"] = {"thinking": False}
    fields |= _object("--body", args.body)
    if not args.plain_body:
        return {SERVED: through_http(endpoint, fields, completion=args.completion)}
    plain = fields | _object("--plain-body", args.plain_body)
    return {
        way: through_http(endpoint, given, completion=args.completion)
        for way, given in ((TREES, fields), (PLAIN, plain))
    }


def _object(option: str, text: str | None) -> dict[str, Any]:
    try:
        found = strict_json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidRequest(option, text, "a JSON object")
    return found


COMMANDS = (Command("eval", "ask small coding tasks, run the answers in a sandbox", add_arguments, run),)
