"""The ``ridgeline`` command: text on stdout, the rest on stderr, mistakes without a traceback."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ridgeline
import tiny_model
from ridgeline import LLM, SamplingParams
from ridgeline.cli import main
from ridgeline.runner import Runner
from tiny_model import one_thread  # noqa: F401


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_model.save_llama(folder)
    tiny_model.save_tokenizer(folder)
    return folder


def generate(folder: Path, *arguments: str) -> int:
    always = ["--model", str(folder), "--device", "cpu", "--temperature", "0"]
    return main(["generate", *always, *arguments])


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    with LLM(folder, device="cpu", num_blocks=8, max_num_seqs=2) as llm:
        params = SamplingParams(temperature=0, max_tokens=9)
        outputs = llm.generate(["the fox", "def"], params)
    return {output.prompt: output.prompt + output.outputs[0].text for output in outputs}


@pytest.mark.parametrize("mode", [[], ["--stream"]], ids=["bar", "stream"])
def test_generate_prints_prompt_and_text(folder: Path, expected, capsys, mode: list[str]):
    assert generate(folder, "the fox", "def", "--max-tokens", "9", *mode) == 0
    out, err = capsys.readouterr()
    assert out == f"{expected['the fox']}\n{expected['def']}\n"
    assert ("2/2 requests" in err) == (not mode)


def test_the_last_line_gives_prefill_and_decode_speed_apart(folder: Path, capsys):
    assert generate(folder, "the fox", "--max-tokens", "9") == 0
    last = capsys.readouterr().err.splitlines()[-1]
    match = re.fullmatch(
        r"prefill: (\d+) tokens, [\d.]+ tokens/s; decode: (\d+) tokens, [\d.]+ tokens/s", last
    )
    assert match is not None and int(match[2]) == 8


@pytest.mark.parametrize("mode", [[], ["--stream"]], ids=["bar", "stream"])
@pytest.mark.parametrize("good", [0, 3], ids=["no token", "some tokens"])
def test_a_request_that_fails_is_said_and_fails_the_command(
    folder: Path, capsys, monkeypatch, mode: list[str], good: int
):
    steps, run = iter(range(99)), Runner.run

    def failing(self: Runner, batch: Any) -> Any:
        if next(steps) >= good:
            raise RuntimeError("out of memory")
        return run(self, batch)

    monkeypatch.setattr(Runner, "run", failing)
    with pytest.warns(RuntimeWarning, match="out of memory"):
        assert generate(folder, "the fox", "--max-tokens", "9", *mode) == 1
    out, err = capsys.readouterr()
    assert out.startswith("the fox")
    assert err.splitlines()[-1] == "ridgeline: error: prompt 0: RuntimeError('out of memory')"


def test_a_prompt_may_come_from_stdin(folder: Path, expected):
    command = [sys.executable, "-m", "ridgeline", "generate", "--model", str(folder)]
    done = subprocess.run(
        [*command, "--device", "cpu", "--temperature", "0", "--max-tokens", "9", "-"],
        input="def",
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, expected["def"] + "\n"), done.stderr


def test_info_is_what_the_function_says(capsys):
    assert main(["info"]) == 0
    assert capsys.readouterr().out == f"{ridgeline.info()}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "0", "x"], "max_tokens must be at least 1, got 0"),
        (["--temperature", "-1", "x"], "temperature must be"),
        (["--temperature", "nan", "x"], "temperature must be"),
        (["--top-p", "0", "x"], "top_p must be"),
        (["--quantization", "int3", "x"], "quantization must be one of"),
        (["--device", "tpu", "x"], "device must be"),
        ([""], "prompt"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(folder: Path, capsys, arguments, message):
    assert generate(folder, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("ridgeline: error: ") and message in err
    assert "Traceback" not in err


def test_a_model_that_is_not_there_is_one_line_and_exit_code_2(tmp_path: Path, capsys):
    assert generate(tmp_path / "nowhere", "x") == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block-size", "17"], "block_size must be one of 16"),
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1, got 0"),
        (["--max-model-len", "100000"], "max_model_len must be at most"),
        (["--gpu-memory-utilization", "inf"], "gpu_memory_utilization must be in (0, 1], got inf"),
        (["--max-num-batched-tokens", "8"], "max_num_batched_tokens must be at least max_num_seqs"),
        (["--length", "0"], "length must be at least 1, got 0"),
        (["--max-model-len", "64", "--length", "65"], "length must be at most 64 (max_model_len)"),
    ],
)
def test_plan_refuses_what_the_engine_does(folder: Path, capsys, arguments, message):
    assert main(["plan", str(folder), "--gpu-memory", "80GiB", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"event": "start", "version": 2}'], ":1: there is no 'machine'"),
        (["[]"], ":1 must hold a JSON object, got []"),
        (["5", '{"event": "schedule"}'], ":1 must hold a JSON object, got 5"),
        ([None, '{"event": "schedule"}'], ":2: there is no 'now'"),
        ([None, '{"event": "commit", "step": 7, "tokens": []}'], ":2: there is no 7"),
        ([None, '{"event": "fly"}'], ":2: unknown event 'fly'"),
        ([None, '{"event": "ran", "step": 0, "us": 1}'], ":2: there is no 'predicted_us'"),
        (
            [None, '{"event": "ran", "step": 0, "us": "1", "predicted_us": 1}'],
            ":2: us must be a number, got '1'",
        ),
    ],
)
def test_replay_names_the_line_of_a_broken_trace(folder, tmp_path, capsys, lines, message):
    trace = tmp_path / "trace"
    with LLM(folder, device="cpu", num_blocks=8, trace=trace):
        pass
    start = trace.read_text().splitlines()[0]
    trace.write_text("\n".join(line or start for line in lines))
    assert main(["replay", str(trace)]) == 2
    assert f"{trace}{message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--width", "0"], "width must be at least 1, got 0"),
        (["--lanes", "-1"], "lanes must be at least 0, got -1"),
    ],
)
def test_replay_refuses_a_picture_of_no_size(folder, tmp_path, capsys, option, message):
    with LLM(folder, device="cpu", num_blocks=8, trace=tmp_path / "trace") as llm:
        llm.generate([1, 2, 3])
    assert main(["replay", str(tmp_path / "trace"), *option]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_in_place_of_a_file_is_one_line_and_exit_code_2(tmp_path: Path, capsys):
    assert main(["replay", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("ridgeline: error: ")


def test_a_reader_that_has_enough_ends_the_command_quietly(folder: Path):
    command = f"{sys.executable} -m ridgeline generate --model {folder} --device cpu --stream"
    script = f"{command} --max-tokens 99 a b c | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "a141\n" and "Error" not in done.stderr


@pytest.mark.parametrize("arguments", [[], ["generate"], ["generate", "x"], ["fly"], ["info", "x"]])
def test_a_wrong_command_line_shows_the_usage(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: ridgeline" in capsys.readouterr().err


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["generate", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for option in ("--model", "--max-tokens", "--temperature", "--stream", "--quantization"):
        assert option in text
