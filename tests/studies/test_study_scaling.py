"""Scaling: known laws come back, noise widens intervals, and what is no law is said."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from small import make_study

from midus.errors import MidusError
from midus.studies.grid import search_trials
from midus.studies.options import read_study
from midus.studies.power_law import fit_law, interval
from midus.studies.scaling import cross, fit_series, make_scaling, predict, ratio
from midus.studies.scaling_series import Point, Series, read_series
from midus.studies.trial import trial_facts

SLOTS = [n * n for n in (16, 32, 64, 128, 256)]
TOKENS = [819_200 * 2**i for i in range(5)]
PLACES = {"base": "nowhere", "tokens": "nowhere"}


def law(x, floor, scale, alpha):
    return floor + scale * x**-alpha


def series_of(places, losses, method="hml", seeds=(0,), spread=None):
    points = [
        Point(float(x), y, seed, 1) for x, y in zip(places, losses, strict=True) for seed in seeds
    ]
    return Series(method, {}, "same", points, spread=spread)


def write_rows(folder, rows):
    """Rows as a study writes them.

    Args:
        folder: Of the study.
        rows: (method, options, seed, tokens, loss, curve); a loss of None is a trial that failed.
    """
    folder.mkdir(exist_ok=True)
    study = make_study(
        PLACES, run={"data": {"sources": "nowhere", "seq_len": 16, "max_tokens": 64}}
    )
    trial = search_trials(study)[0]
    lines = []
    for number, (method, options, seed, tokens, loss, curve) in enumerate(rows):
        row = trial_facts(study, trial, f"key{number}")
        data = {**row["options"]["data"], "max_tokens": tokens}
        row["options"] |= {"seed": seed, "data": data, **options}
        row |= {"method": method, "seed": seed, "identity": "same", "hardware": "none"}
        row |= {"conditions": {}, "tokens": tokens, "texts": {}, "trainable": 10**6}
        score = {"loss": loss, "perplexity": None}
        row |= {"status": "done" if loss else "diverged", "validation": score, "test": score}
        lines.append({**row, "curve": [{"tokens": x, "validation_loss": y} for x, y in curve]})
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def hml(n, method="midus", **others):
    memory = {"kind": "hml", "num_subkeys": n}
    return {"upscale": {"method": method, "memory": memory, "seed": 0}, **others}


@pytest.mark.parametrize("places", [SLOTS, TOKENS])
@pytest.mark.parametrize(
    ("floor", "scale", "alpha"), [(1.2, 1.5, 0.3), (0, 4.0, 0.08), (0.9, 60, 1)]
)
def test_a_law_without_noise_comes_back_to_a_percent(places, floor, scale, alpha):
    x = np.array(places, dtype=float)
    found = fit_law(x, law(x, floor, scale, alpha))
    assert [float(found.floor), float(found.scale), float(found.alpha)] == pytest.approx(
        [floor, scale, alpha], rel=0.01, abs=1e-3
    )


def test_nothing_goes_below_zero():
    x = np.array(TOKENS, dtype=float)
    # A straight line in log x: as a power law it would want a floor below 0.
    found = fit_law(x, 3 - 0.2 * np.log10(x / x[0]))
    assert found.floor == 0
    rising = fit_law(x, 1 + 0.2 * np.log10(x / x[0]))
    assert rising.scale == 0
    assert rising.floor == pytest.approx(1 + 0.2 * math.log10(4))


def test_a_law_with_noise_lies_within_its_intervals():
    generator = np.random.default_rng(7)
    noise = generator.standard_normal(len(TOKENS)) * 0.003
    losses = [law(x, 1.1, 60, 0.35) + e for x, e in zip(TOKENS, noise, strict=True)]
    fit = fit_series(series_of(TOKENS, losses))
    for drawn, true in ((fit.draws.alpha, 0.35), (fit.draws.floor, 1.1), (fit.draws.scale, 60)):
        low, high = interval(drawn)
        assert low < true < high
    assert 0.99 < fit.r2 < 1
    one = predict(fit, 1e8)
    assert one.low < law(1e8, 1.1, 60, 0.35) < one.high
    assert one.low < one.loss < one.high
    assert one.decades == pytest.approx(math.log10(1e8 / TOKENS[-1]))
    assert (predict(fit, 2e6).decades, predict(fit, 81_920).decades) == (0, pytest.approx(1))


def test_more_noise_and_farther_places_have_wider_intervals():
    noise = np.array([1, -1, 1, 1, -1])

    def width(size, x):
        losses = [law(t, 1.1, 60, 0.35) + size * e for t, e in zip(TOKENS, noise, strict=True)]
        one = predict(fit_series(series_of(TOKENS, losses)), x)
        return one.high - one.low

    assert width(0, 1e8) < width(0.001, 1e8) < width(0.004, 1e8)
    assert width(0.001, 3e6) < width(0.001, 1e8) < width(0.001, 1e10)


def test_residuals_that_are_small_by_luck_do_not_hide_what_seeds_say():
    losses = [law(x, 1.1, 60, 0.35) for x in TOKENS]

    def width(spread):
        one = predict(fit_series(series_of(TOKENS, losses, spread=spread)), 1e8)
        return one.high - one.low

    assert width(None) < 1e-3 < 1e-2 < width(0.003) < width(0.01)


@pytest.mark.parametrize(
    ("span", "spread", "seeds", "why_not"),
    [
        (0.004, None, 1, "flat: losses span 0.0040, under 0.005"),
        (0.03, 0.01, 1, "flat: losses span 0.0300, under the seeds' spread 0.0400"),
        # A mean over four seeds has half the noise: 4 x 0.01 / 2 = 0.02.
        (0.03, 0.01, 4, ""),
        (0.006, None, 1, ""),
        (0.006, 0.001, 1, ""),
    ],
)
def test_losses_within_the_noise_are_flat(span, spread, seeds, why_not):
    falling = [2 + span * (1 - i / 4) for i in range(5)]
    fit = fit_series(series_of(SLOTS, falling, seeds=range(seeds), spread=spread), "slots")
    assert fit.why_not == why_not
    assert (fit.law is None) == bool(why_not)


def test_a_loss_that_rises_has_no_law():
    fit = fit_series(series_of(SLOTS, [2.0, 2.1, 2.2, 2.3, 2.4]), "slots")
    assert (fit.law, fit.why_not) == (None, "loss does not fall with slots")


def test_three_points_are_refused():
    with pytest.raises(MidusError, match="hml has 3 points and a law has three unknowns"):
        fit_series(series_of(SLOTS[:3], [2.0, 1.9, 1.8]))


def test_laws_cross_where_they_do_by_hand():
    # 10 x^-0.3 = 100 x^-0.5 where x^0.2 = 10: at 100,000, a hundred times the last point.
    places = [10**2, 10**2.25, 10**2.5, 10**2.75, 10**3]
    one = fit_series(series_of(places, [law(x, 1, 10, 0.3) for x in places]))
    other = fit_series(series_of(places, [law(x, 1, 100, 0.5) for x in places], "other"))
    found = cross(one, other)
    assert found.places == pytest.approx([1e5], rel=0.02)
    assert found.share == 1
    assert found.until == pytest.approx(1e9)


def test_laws_apart_do_not_cross():
    one = fit_series(series_of(TOKENS, [law(x, 1, 10, 0.3) for x in TOKENS]))
    other = fit_series(series_of(TOKENS, [law(x, 1.2, 10, 0.3) for x in TOKENS], "other"))
    found = cross(one, other)
    assert (found.places, found.share) == ([], 0)


def test_the_share_of_loss_is_that_of_the_law():
    fit = fit_series(series_of(SLOTS, [law(x, 1, 2, 0.5) for x in SLOTS]))
    # L(256) = 1.125 and L(4096) = 1.03125.
    assert ratio(fit, 256, 4096) == pytest.approx((1.03125 / 1.125,) * 3, rel=1e-4)


def test_series_hold_all_else_equal(tmp_path):
    rows = [("hml", hml(n), 0, 6400, 2.0 - n / 1000, []) for n in (16, 32, 64)]
    rows += [("hml", hml(n), 0, 12800, 1.9, []) for n in (16, 32)]
    rows += [("hml", hml(64, batch_size=8), 0, 12800, 1.8, [])]
    rows += [("hml", hml(128), 0, 6400, None, [])]
    rows += [("llama_pro", hml(64, "llama_pro"), 0, 6400, 1.7, [])]
    rows += [("lora", hml(64, control="lora"), 0, 6400, 1.7, [])]
    found, num_failed = read_series(write_rows(tmp_path, rows), "slots")
    assert num_failed == 1
    assert {(s.label, tuple(s.places)) for s in found} == {
        ("hml, max_tokens=6,400, batch_size=4", (256, 1024, 4096)),
        ("hml, max_tokens=12,800, batch_size=4", (256, 1024)),
        ("hml, max_tokens=12,800, batch_size=8", (4096,)),
    }
    over_tokens, _ = read_series(tmp_path, "tokens")
    assert {(s.method, tuple(s.places)) for s in over_tokens if len(s.places) > 1} == {
        ("hml", (6400, 12800))
    }
    assert {s.method for s in over_tokens} == {"hml", "llama_pro", "lora"}


def test_a_fit_goes_through_the_seeds_that_every_place_has(tmp_path):
    rows = [("hml", hml(n), 0, 6400, 2.0, []) for n in (16, 32, 64, 128)]
    rows += [("hml", hml(128), 1000, 6400, 2.2, []), ("hml", hml(128), 2000, 6400, 2.4, [])]
    (series,) = read_series(write_rows(tmp_path, rows), "slots")[0]
    assert (series.seeds, series.means()) == ([0], [2.0] * 4)
    # Seeds at 128 are 2.0, 2.2 and 2.4.
    assert series.spread == pytest.approx(0.2)


def test_ultramem_addresses_four_times_as_many_slots(tmp_path):
    options = hml(16)
    options["upscale"]["memory"]["kind"] = "ultramem"
    found, _ = read_series(write_rows(tmp_path, [("u", options, 0, 64, 2.0, [])]), "slots")
    assert found[0].places == [1024]


def test_ends_of_runs_and_points_of_curves_are_never_mixed(tmp_path):
    curve = [(x / 10, 3 * law(x, 1.1, 60, 0.35)) for x in TOKENS]
    rows = [("hml", hml(64), 0, x, law(x, 1.1, 60, 0.35), curve) for x in TOKENS]
    folder = write_rows(tmp_path, rows)
    (fit,) = make_scaling(folder, "tokens").fits
    assert [p.x for p in fit.points] == TOKENS
    inside = make_scaling(folder, "tokens", curves=True).fits
    assert len(inside) == len(TOKENS)
    assert all([p.x for p in fit.points] == [x / 10 for x in TOKENS] for fit in inside)
    assert inside[0].series.setting == "max_tokens=819,200"


@pytest.fixture
def studied(tmp_path):
    """Slots by tokens, and another method over tokens."""

    def loss(n, x):
        return law(x, 1.1, 60, 0.35) + 2 * (n * n) ** -0.5

    ns = (16, 32, 64, 128, 256)
    rows = [("hml", hml(n), 0, x, loss(n, x), []) for n in ns for x in TOKENS]
    other = hml(64, "llama_pro")
    rows += [("llama_pro", other, 0, x, law(x, 1.1, 6000, 0.65), []) for x in TOKENS]
    return write_rows(tmp_path / "study", rows)


def test_the_command_fits_over_slots_and_says_what_it_assumes(midus, studied):
    known = ["--predict", "--known", "1b=2.5@4096", "--at", "1e6"]
    done = midus("study", "scaling", studied, *known)
    assert (done.code, done.err) == (0, "")
    values = json.loads((studied / "scaling-slots.json").read_text())
    assert (studied / "scaling-slots.png").stat().st_size > 0
    assert [one["setting"] for one in values["series"]] == [f"max_tokens={x:,}" for x in TOKENS]
    last = values["series"][-1]
    floor = law(TOKENS[-1], 1.1, 60, 0.35)
    found = {name: last["law"][name]["value"] for name in ("E", "A", "alpha")}
    assert found == pytest.approx({"E": floor, "A": 2, "alpha": 0.5}, rel=0.01)
    (one,) = last["predictions"]
    assert one["loss"] == pytest.approx(floor + 2e-3, rel=1e-3)
    assert one["decades"] == pytest.approx(math.log10(1e6 / 256**2))
    # Carried by the law of the longest runs alone.
    assumed = values["assumed"]["losses"]
    assert {row["series"] for row in assumed} == {f"hml, max_tokens={TOKENS[-1]:,}"}
    (moved,) = [row for row in assumed if row["slots"] == 65536]
    assert moved["loss"] == pytest.approx(2.5 * (floor + 2 / 256) / (floor + 2 / 64), rel=1e-3)
    assert "an assumption that nothing here was measured for" in done.out
    assert "by 1.18 decades" in done.out


def test_the_command_fits_over_tokens_and_says_where_laws_would_cross(midus, studied, tmp_path):
    out = tmp_path / "elsewhere.json"
    done = midus("study", "scaling", studied, "--over", "tokens", "--json", out)
    assert done.code == 0
    values = json.loads(out.read_text())
    assert {one["method"] for one in values["series"]} == {"hml", "llama_pro"}
    (pair,) = [c for c in values["crossings"] if c["series"][0] == "hml, num_subkeys=256"]
    (x,) = pair["at"]
    # There both laws say the same, without the 1.1 they share.
    assert law(x, 0, 6000, 0.65) == pytest.approx(law(x, 2 / 256, 60, 0.35), rel=1e-3)
    assert f"hml, num_subkeys=256 and llama_pro would cross at {x:.3g}, inside the data" in done.out
    assert "an assumption" not in done.out
    assert midus("study", "scaling", studied, "--over", "tokens", "--curves").code == 2


def test_flat_losses_are_said_to_be_flat(midus, tmp_path):
    rows = [("hml", hml(n), 0, 6400, 2.0 + n * 1e-6, []) for n in (16, 32, 64, 128)]
    done = midus("study", "scaling", write_rows(tmp_path, rows), "--predict")
    assert done.code == 0
    assert "hml: flat: losses span 0.0001, under 0.005" in done.out
    assert "no law, so there is no share of loss" in done.out
    (one,) = json.loads((tmp_path / "scaling-slots.json").read_text())["series"]
    assert one["law"] is None


@pytest.mark.parametrize(
    ("rows", "args", "message"),
    [
        (None, [], "is missing or has no trial"),
        ([], [], "is missing or has no trial"),
        (3, [], "no method with 4 numbers of slots"),
        (3, ["--over", "time"], "over='time' is no axis"),
        (4, ["--at", "1e8,much"], "at='much' must be a number"),
        (4, ["--at", ","], "at=',' names nothing; give one or more, or leave it out"),
        (4, ["--curves"], "--curves are points over tokens"),
        (4, ["--over", "tokens", "--predict"], "--predict is about slots"),
        (4, ["--known", "1b=2@4096"], "--known goes with --predict"),
        (4, ["--predict", "--known", "1b=2"], "slots of known 1b='' must be a number"),
        (4, ["--predict", "--known", "1b"], "known='1b' must be a name"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(midus, tmp_path, rows, args, message):
    folder = tmp_path / "study"
    if rows is not None:
        many = range(rows) if rows else []
        write_rows(folder, [("hml", hml(16 * 2**i), 0, 64, 2 - i / 9, []) for i in many])
    done = midus("study", "scaling", folder, *args)
    assert done.code == 2
    assert message in " ".join(done.err.split())
    assert "Traceback" not in done.err


def test_without_matplotlib_there_is_no_picture(midus, studied, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "matplotlib" else real(name, *a),
    )
    done = midus("study", "scaling", studied)
    assert (done.code, "picture    none" in done.out) == (0, True)
    assert not (studied / "scaling-slots.png").exists()


def test_the_grid_has_four_or_more_places_on_both_axes():
    trials = search_trials(read_study(Path(__file__).parents[2] / "studies" / "scaling.yaml"))
    own = [t.options for t in trials if t.method == "hml"]
    ns = {o.upscale.memory.num_subkeys for o in own}
    tokens = {o.data.max_tokens for o in own}
    assert sorted(ns) == [16, 32, 64, 128, 256]
    assert sorted(tokens) == [409_600 * 2**i for i in range(5)]
    assert {(o.upscale.memory.num_subkeys, o.data.max_tokens) for o in own} == {
        (n, t) for n in ns for t in tokens
    }
    others = {t.options.data.max_tokens for t in trials if t.method == "llama_pro"}
    assert others == tokens


def test_the_draws_of_two_laws_are_apart():
    noise = np.random.default_rng(3).normal(0, 0.01, (2, 5))
    x = np.array(TOKENS, dtype=float)
    one, other = (
        fit_series(series_of(TOKENS, list(law(x, 1.2 + gap, 8.0, 0.25) + own), method))
        for method, gap, own in (("hml", 0.0, noise[0]), ("llama_pro", 0.01, noise[1]))
    )
    # Noise as large as the gap: with the same noise in both, hardly any pair would cross.
    assert cross(one, other).share > 0.1


def test_rows_older_than_an_option_stay_in_their_series(tmp_path):
    def row(n, **memory):
        options = hml(n)
        options["upscale"]["memory"] |= memory
        return ("hml", options, 0, 64, 2.0 - n / 1000, [])

    rows = [row(16), row(32), *(row(n, bypass="none") for n in (64, 128, 256))]
    (series,), _ = read_series(write_rows(tmp_path / "study", rows), "slots")
    assert len(series.points) == 5


@pytest.mark.parametrize(
    "broken",
    [
        {"options": []},
        {"validation": {"loss": "much"}},
        {"options": {"upscale": {"method": "midus"}}},
    ],
)
def test_a_row_that_no_study_writes_is_named(tmp_path, broken):
    folder = write_rows(tmp_path / "study", [("hml", hml(16), 0, 64, 2.0, [])])
    row = json.loads((folder / "results.jsonl").read_text())
    (folder / "results.jsonl").write_text(json.dumps({**row, **broken}) + "\n")
    with pytest.raises(MidusError, match="the row of hml with key 'key0' is not as a study writes"):
        read_series(folder, "slots")
