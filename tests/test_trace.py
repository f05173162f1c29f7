"""A trace replays bit for bit without a model, and what differs is found at once."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from xml.etree import ElementTree

import pytest

import tiny_model
from ridgeline import LLM, SamplingParams
from ridgeline.cli import main
from ridgeline.timeline import Timeline
from ridgeline.trace import Replay, ReplayError
from tiny_model import one_thread  # noqa: F401


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chunks, prefix hits, n outputs, an abort, preemptions to the host and to nothing."""
    folder = tmp_path_factory.mktemp("llama")
    tiny_model.save_llama(folder)
    path = folder / "trace.jsonl"
    options = {"num_blocks": 11, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 48}
    with LLM(folder, device="cpu", trace=path, swap_space=0.001, **options) as llm:
        llm._parts.runner.asynchronous = True
        start = tiny_model.prompt_of(40)
        prompts = [start + tiny_model.prompt_of(4, i) for i in range(6)] + [[1, 2], [3]]
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        for piece in llm.stream(prompts, params):
            if piece.prompt_index == 2:
                llm.abort(piece.request_id)
        llm.generate([[4], [5]], SamplingParams(n=3, seed=1, max_tokens=4), priority=[1, 0])
        assert llm.stats().preemptions > 0
    return path


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_decision_and_batch_is_made_again(trace: Path):
    events = [event for event, _ in Replay(trace).events()]
    assert events == lines_of(trace)[1:]
    steps = [e for e in events if e["event"] == "schedule" and e["step"] is not None]
    assert len(steps) == len([e for e in events if e["event"] == "ran"]) > 30


def test_the_time_of_steps_stands_beside_its_prediction(trace: Path):
    ran = [line for line in lines_of(trace) if line["event"] == "ran"]
    assert all(line["us"] > 0 and line["predicted_us"] > 0 for line in ran)


@pytest.mark.parametrize(
    ("event", "field", "message"),
    [
        ("admitted", "a", "the decision differs"),
        ("schedule", "digest", "the batch differs"),
        ("finished", None, "the decision differs"),
    ],
)
def test_the_first_difference_is_an_error_with_its_line(
    trace: Path, tmp_path: Path, event: str, field: str | None, message: str
):
    lines = lines_of(trace)
    at = next(i for i, line in enumerate(lines) if line["event"] == event and i > 20)
    if field is None:
        del lines[at]
    else:
        lines[at][field] = "?"
    changed = tmp_path / "changed.jsonl"
    changed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ReplayError, match=rf"changed.jsonl:{at + 1}: {message}"):
        list(Replay(changed).events())


@pytest.mark.parametrize("text", ["", "{}\n", "no json\n", '{"event": "start", "version": 0}\n'])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="x.jsonl"):
        Replay(path)


def test_the_timeline_has_a_lane_for_each_request(trace: Path):
    timeline = Timeline.of(Replay(trace))
    assert len(timeline.lanes) == 10
    assert [lane.prompt for lane in timeline.lanes] == [44] * 6 + [2, 1, 1, 1]
    letters = {letter for lane in timeline.lanes for letter in lane.states}
    assert {".", "#", "="} < letters and letters & {"x", "~"}
    assert timeline.lanes[0].states[0] == "#"
    tokens = [lane.states.count("=") for lane in timeline.lanes[:2]]
    assert all(29 <= count <= 31 for count in tokens)
    assert 0 < timeline.hit_rate < 1 and max(timeline.occupancy) > 0.8


@pytest.mark.parametrize("room", [5000, 0], ids=["a little room", "none"])
def test_a_full_disk_ends_the_trace_and_no_request(tmp_path: Path, room: int):
    tiny_model.save_llama(tmp_path)
    path = tmp_path / "trace.jsonl"
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with LLM(tmp_path, device="cpu", trace=path, num_blocks=4) as llm:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            with pytest.warns(RuntimeWarning, match=f"trace {path} ends here") as warned:
                outputs = [llm.generate([1, 2], params)[0].outputs[0] for _ in range(2)]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert len(warned) == 1
        assert [len(output.token_ids) for output in outputs] == [30, 30]
    if room:
        assert [event["event"] for event, _ in Replay(path).events()][-1] == "ran"
    else:
        assert path.read_bytes() == b""


def test_replay_prints_and_draws(trace: Path, tmp_path: Path, capsys):
    picture = tmp_path / "timeline.svg"
    assert main(["replay", str(trace), "--svg", str(picture), "--width", "60", "--lanes", "5"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert "10 requests" in rows[0] and any("5 more" in row for row in rows)
    assert max(map(len, rows[2:7])) <= 14 + 61
    assert any(row.startswith("decisions: admitted") for row in rows)
    assert any("by roofline at least" in row for row in rows)
    root = ElementTree.parse(picture).getroot()
    kinds = [child.tag.rpartition("}")[2] for child in root]
    assert kinds.count("polyline") == 3 and kinds.count("rect") > 20


def test_replay_of_a_difference_fails(trace: Path, tmp_path: Path, capsys):
    changed = tmp_path / "changed.jsonl"
    changed.write_text(trace.read_text().replace('"event": "admitted"', '"event": "chunked"', 1))
    assert main(["replay", str(changed)]) == 2
    assert "the decision differs" in capsys.readouterr().err
