"""Tables in the documents are made from the result files, and say what those say."""

import json
from pathlib import Path

import pytest

from midus import MidusError
from midus.efficiency.protocol import make_protocol
from midus.efficiency.rows import Point, empty_row
from midus.efficiency.subjects import parse_subjects
from midus.efficiency.tables import (
    blocks_of,
    decode_table,
    eager_table,
    efficiency_table,
    goals_table,
    headline_table,
    markers_of,
    paired_table,
    prefill_table,
    replace_blocks,
    sweep_table,
)

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def make_row(text, **values):
    (subject,) = parse_subjects(text)
    point = Point(subject=subject, protocol=make_protocol("cuda"), labels={})
    return {**empty_row(point), "params_trainable": 10**9, "params_total": 2 * 10**9, **values}


def make_result(*rows):
    return {
        "hardware": "a GPU",
        "versions": {"torch": "1", "transformers": "2"},
        "commit": "abc",
        "date": "2030-01-02T03:04:05+00:00",
        "command": "midus bench x",
        "protocol": {"base": "llama-3.1-8b"},
        "rows": list(rows),
    }


ROWS = [
    make_row("base", train_gb=80.0, train_s_per_iter=4.0, decode_compiled_tok_s=100.0,
             prefill_ms={"128": 5.0, "2048": 50.0}),
    make_row("llama_pro", train_gb=60.0, train_s_per_iter=5.0, decode_compiled_tok_s=75.0,
             prefill_ms={"128": 8.0, "2048": 80.0}),
    make_row("midus:hml", train_s_per_iter=None, oom=["train"], decode_compiled_tok_s=95.0,
             prefill_ms={"128": 6.0, "2048": 60.0}),
]  # fmt: skip


def cells(table):
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_headline_has_figures_and_their_ratios():
    table = headline_table(make_result(*ROWS))
    _, _, base, copies, hml = cells(table)
    assert base == [
        "Base", "1.00 / 2.00", "80.0", "4.00 (0.80x)", "100.0 (1.00x)", "50.0 (1.00x)",
    ]  # fmt: skip
    assert copies[3:] == ["5.00 (1.00x)", "75.0 (0.75x)", "80.0 (1.60x)"]
    assert hml[2:] == ["out of memory", "out of memory", "95.0 (0.95x)", "60.0 (1.20x)"]
    assert table.splitlines()[-1] == (
        "`midus bench x` on a GPU, torch 1, transformers 2, commit `abc`, 2030-01-02."
    )


def test_the_papers_figures_have_columns_of_their_own():
    heads, _, *lines = cells(efficiency_table(make_result(*ROWS)))
    assert heads[-3:] == ["paper: GB train / infer", "paper: s/iter", "paper: tok/s"]
    assert lines[2][-3:] == ["34.8 / 20.1", "5.05", "50.5"]
    elsewhere = {**make_result(*ROWS), "protocol": {"base": "tiny"}}
    assert not any("paper" in head for head in cells(efficiency_table(elsewhere))[0])


def test_prefill_stands_beside_its_change_against_llama_pro():
    _, _, first, second = cells(prefill_table(make_result(*ROWS)))
    assert first == ["128", "5.0 (-3.0)", "8.0", "6.0 (-2.0)"]
    assert second == ["2,048", "50.0 (-30.0)", "80.0", "60.0 (-20.0)"]


def test_sweeps_and_decoding_have_a_line_a_row():
    swept = [
        make_row("midus:hml", over="batch", value=16, train_s_per_iter=1.5, train_gb=30.0),
        make_row("midus:hml", over="batch", value=64, oom=["train"]),
    ]
    _, _, *lines = cells(sweep_table(make_result(*swept)))
    assert lines == [
        ["MIDUS HML", "16", "1.500", "30.0"],
        ["MIDUS HML", "64", "out of memory", "out of memory"],
    ]
    decoded = [
        make_row(name, batch=batch, context=128, decode_compiled_tok_s=rate, kv_cache_bytes=10**9)
        for name, batch, rate in (("base", 1, 100.0), ("base", 8, 800.0), ("midus:hml", 8, 720.0))
    ]
    line = cells(decode_table(make_result(*decoded)))[-1]
    assert line == ["MIDUS HML", "128", "8", "-", "720.0 (0.90x)", "-", "1.00"]


def test_blocks_replace_what_stands_between_their_markers(tmp_path):
    path = tmp_path / "efficiency-llama-3.1-8b.json"
    path.write_text(json.dumps(make_result(*ROWS)))
    readme, page = blocks_of(tmp_path)
    assert list(page) == ["efficiency-llama-3.1-8b", "goals"]
    text = "before\n<!-- efficiency:begin -->\nold\n<!-- efficiency:end -->\nafter\n"
    written = replace_blocks(text, readme)
    assert headline_table(make_result(*ROWS)) in written
    assert "old" not in written
    assert written.startswith("before\n")
    assert written.endswith("\nafter\n")
    assert replace_blocks(written, readme) == written


def test_a_figure_that_wavers_has_its_spread_and_no_ratio():
    rows = [
        make_row("base", train_s_per_iter=1.0, train_s_spread=0.01, decode_eager_tok_s=50.0),
        make_row("llama_pro", train_s_per_iter=1.0, train_s_spread=0.3, decode_eager_tok_s=40.0,
                 decode_eager_spread=1.0),
        make_row("midus:hml", train_s_per_iter=0.5, train_s_spread=0.01, decode_eager_tok_s=45.0,
                 decode_eager_spread=9.0),
    ]  # fmt: skip
    lines = cells(efficiency_table(make_result(*rows)))
    eager = lines[0].index("eager tok/s (x base)")
    train = lines[0].index("train s/iter (x Llama Pro)")
    assert [line[train] for line in lines[2:]] == ["1.00 (1.00x)", "1.00 ± 0.30", "0.50 (0.50x)"]
    assert [line[eager] for line in lines[2:]] == ["50.0 (1.00x)", "40.0 (0.80x)", "45.0 ± 9.0"]


def test_eager_decoding_has_its_fastest_repeat_beside_where_every_repeat_is_known():
    rows = [
        make_row("base", decode_eager_tok_s=30.0, decode_eager_spread=30.0,
                 decode_eager_runs=[20.0, 30.0, 50.0]),
        make_row("midus:hml", decode_eager_tok_s=28.0, decode_eager_spread=1.0,
                 decode_eager_runs=[40.0, 28.0, 27.0]),
    ]  # fmt: skip
    lines = cells(eager_table(make_result(*rows)))
    assert lines[0][-1] == "fastest repeat, tok/s (x base)"
    assert [line[-1] for line in lines[2:]] == ["50.0 (1.00x)", "40.0 (0.80x)"]
    unknown = [{k: v for k, v in row.items() if k != "decode_eager_runs"} for row in rows]
    assert cells(eager_table(make_result(*unknown)))[0] == ["", "eager tok/s (x base)"]


def test_goals_are_ratios_of_the_rows_they_name():
    rows = [
        make_row("base", decode_compiled_tok_s=100.0, prefill_ms={"2048": 10.0}),
        make_row("llama_pro", train_s_per_iter=2.0, decode_compiled_tok_s=70.0),
        make_row("opt_deus", train_s_per_iter=1.6),
        make_row("midus:pkm", train_s_per_iter=9.0, decode_compiled_tok_s=9.0),
        make_row("midus:hml", train_s_per_iter=1.4, decode_compiled_tok_s=94.0, train_gb=40.0,
                 prefill_ms={"2048": 11.0}),
        make_row("midus:hml@top_heavy", train_s_per_iter=1.0),
    ]  # fmt: skip
    found = {line[0]: line[1:4] for line in cells(goals_table(make_result(*rows)))[2:]}
    assert found["compiled decoding, x base"] == ["≥ 0.93", "0.94", "yes"]
    assert found["compiled decoding, x Llama Pro"] == ["≥ 1", "1.34", "yes"]
    assert found["prefill of 2,048, x base"] == ["≤ 1.11", "1.1", "yes"]
    assert found["prefill of 8,192, x base"] == ["≤ 1.14", "-", "-"]
    assert found["training, x Llama Pro"] == ["≤ 0.68", "0.7", "no"]
    assert found["training, both Top-heavy, x OpT-DeUS"] == ["≤ 0.65", "0.625", "yes"]
    assert found["training memory, GB"] == ["≤ 33", "40", "no"]


def test_the_goal_of_eager_decoding_is_that_of_models_in_turns_where_there_is_one():
    rows = [
        make_row("base", decode_eager_tok_s=50.0),
        make_row("midus:hml", decode_eager_tok_s=20.0),
    ]
    in_turns = [
        {**row, "fastest_tok_s": 60.0, "ratio": ratio, "ratio_quartiles": [ratio - 0.1, ratio]}
        for row, ratio in zip(rows, (1.0, 0.9), strict=True)
    ]
    result, paired = make_result(*rows), make_result(*in_turns)
    for given, expected in ((None, ["≥ 0.83", "0.4", "no"]), (paired, ["≥ 0.83", "0.9", "yes"])):
        found = {line[0]: line[1:4] for line in cells(goals_table(result, given))[2:]}
        assert found["eager decoding, x base"] == expected
    lines = cells(paired_table(paired))
    assert lines[3] == ["MIDUS HML", "20.0", "60.0", "0.900 (0.800 to 0.900)"]


def test_markers_without_a_result_or_an_end_are_errors():
    text = "<!-- efficiency:begin -->\n<!-- efficiency:end -->"
    assert markers_of(text) == ["efficiency"]
    with pytest.raises(MidusError, match="no result file"):
        replace_blocks(text, {})
    with pytest.raises(MidusError, match="add it"):
        replace_blocks("<!-- efficiency:begin -->", {"efficiency": "table"})
    other = "<!-- stack:begin -->x<!-- stack:end -->"
    assert replace_blocks(other, {}) == other


@pytest.mark.parametrize(("name", "which"), [("README.md", 0), ("docs/results/efficiency.md", 1)])
def test_documents_say_what_was_measured(name, which):
    """Fails for a marker without its result file, and for a table that is not the file's."""
    path = ROOT / name
    text = path.read_text() if path.exists() else ""
    blocks = blocks_of(RESULTS)[which]
    assert replace_blocks(text, blocks) == text
    assert set(blocks) <= set(markers_of(text)), "a result that no document shows"


def test_a_sweep_in_which_nothing_ran_out_of_memory_is_laid_out(tmp_path):
    import warnings

    from midus.efficiency.plots import plot_sweep

    rows = [
        make_row(
            "midus", memory="hml", train_s_per_iter=1.0 + k, train_gb=5.0, over="top_k", value=k
        )
        for k in (1, 2, 4)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_sweep(rows, tmp_path / "sweep.png", "a title")
    assert (tmp_path / "sweep.png").stat().st_size > 1000
