"""The command line: `python3 -m dspark COMMAND`; without one it lists them.

Needs the standard library only, and an old Python gets as far as the message that says which one is needed.
"""

import argparse
import errno
import importlib
import subprocess
import sys
import traceback

from dspark import UserError, __version__

PYTHONS = ((3, 11), (3, 14))
# These have their own command lines, in the module that does the work.
MODULES = {
    "data": ("dspark.selfwrite", "main", "write training prompts and responses with the target"),
    "train": ("dspark.train", "main", "train a drafter"),
    "search": ("dspark.search", "main", "try what decides a drafter's quality, one change a trial"),
    "sweep": ("dspark.evaluate", "main", "measure drafters on benchmarks over n"),
    "serve": ("dspark.serve", "main", "start a live verifier and train on what it streams"),
    "plan": ("dspark.plan", "main", "say whether such a training fits the machine"),
    "calibrate": ("dspark.ablation", "main", "fit the temperatures of a drafter's confidences, beside its weights"),
    "export": ("dspark.exchange", "export", "write a drafter in a public format, with its model card"),
    "load": ("dspark.exchange", "load", "check a drafter of any public format against its target"),
    "bench kernels": ("dspark.bench_kernels", "main", "measure the Triton kernels on a GPU"),
    "bench stream": ("dspark.bench_stream", "main", "measure the transport of hidden states against files"),
    "bench train": ("dspark.bench_train", "main", "measure training against speculators' trainer"),
    "inspect": ("dspark.inspect_checkpoint", "main", "show what a checkpoint is and what is odd about it"),
}


def main(argv=None):
    """Run one command and return its exit code: 2 for a wrong request or machine, 1 for a failed run."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        check_python(sys.version_info[:2])
        return dispatch(argv)
    except UserError as error:
        return complain(error)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return complain(f"the disk is full: free some space, then run it again ({error})" if full else error)
    except ValueError as error:  # what dspark's modules raise for a wrong value, with the mend in the message
        return complain(error)
    except KeyboardInterrupt:
        print("dspark: interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def complain(error):
    """One line for a wrong request or machine, and exit code 2; `python3 -X dev` shows where it came from."""
    if sys.flags.dev_mode and isinstance(error, Exception):
        traceback.print_exception(error)
    print(f"dspark: {error}", file=sys.stderr)
    return 2


def check_python(version):
    """Raise UserError unless `version`, (major, minor), is one that the packages are made for."""
    if not PYTHONS[0] <= version <= PYTHONS[1]:
        low, high, this = (".".join(map(str, v)) for v in (*PYTHONS, version))
        raise UserError(f"Python {this} will not do: use one from {low} to {high}, as in python{low} -m dspark")


def dispatch(argv):
    """Set up what is missing, then run the command that `argv` names."""
    from dspark import notebooks, setup

    words = 2 if argv[:1] == ["bench"] else 1
    command = " ".join(argv[:words])
    if command in MODULES:
        setup.ensure(argv)
        module, function, _ = MODULES[command]
        return getattr(importlib.import_module(module), function)(argv[words:]) or 0
    if command == "test":
        setup.ensure(argv)
        setup.add_peers()
        return run_tests(argv[1:])
    args = parser().parse_args(argv)
    if args.command == "run":
        notebooks.check(args)  # before an installation that may take minutes
        setup.ensure(argv)
        return notebooks.run(args)
    setup.ensure(argv)
    from dspark.terminal import generate

    return generate(args) or 0


def run_tests(arguments):
    """ruff, then pytest with `arguments`, whose summary is so the last thing printed; 1 if either fails or dies."""
    from dspark.paths import ROOT

    tools = [["ruff", "check"], ["pytest", *arguments]]
    codes = [subprocess.run([sys.executable, "-m", *tool], cwd=ROOT).returncode for tool in tools]
    return int(any(codes))  # of a tool that a signal ended the code is negative


def parser():
    """The parser of the whole command line."""
    from dspark import notebooks

    top = argparse.ArgumentParser(prog="python3 -m dspark", description="DSpark: speculative decoding.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", required=True)

    run = commands.add_parser(
        "run",
        help="execute the notebooks",
        description="Execute the notebooks in order. An interrupted run goes on where it stopped.",
        epilog=notebooks.summary(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("--profile", default="cpu", help="a file of notebooks/params (default: %(default)s)")
    run.add_argument("--only", metavar="02,03", default=notebooks.MAIN_JOB, help="these, or all (default: %(default)s)")
    run.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="set a parameter")
    run.add_argument("--out", metavar="DIR", help="where results go (default: .runs/<profile>)")
    run.add_argument("--benchmarks", metavar="DIR", help="a folder of benchmarks, JSONL rows with `turns`")
    run.add_argument("--fresh", action="store_true", help="execute again what is already done")
    run.add_argument("--commit", action="store_true", help="copy the executed notebooks over notebooks/")

    commands.add_parser("test", help="ruff and the tests; further arguments go to pytest", add_help=False)
    for name, (_, _, what) in MODULES.items():
        commands.add_parser(name, help=what, add_help=False)

    generate = commands.add_parser("generate", help="answer a prompt in the terminal and compare the speed")
    generate.add_argument("prompt")
    generate.add_argument("--target", help="a preset, a hub name or a folder (default: SmolLM2-135M)")
    generate.add_argument("--drafter", help="a checkpoint folder (default: the committed one)")
    generate.add_argument("-n", type=int, help="tokens drafted per step (default: 4, or the drafter's most)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--max-new-tokens", type=int, default=256, help="default: %(default)s")
    dtypes = ("auto", "float32", "bfloat16")
    generate.add_argument("--dtype", choices=dtypes, default="auto", help="auto: bfloat16 where it is the faster")
    generate.add_argument("--threshold", type=float, default=0.0, help="draft while confidence is above it")
    generate.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    return top


if __name__ == "__main__":
    sys.exit(main())
