import functools
import json
import time

import pytest

import bench


@pytest.mark.slow
def test_a_table_and_its_figures(tmp_path, capsys):
    bench.main(["--rounds", "1", "--only", "gpt", "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())
    table, = figures["tables"]
    assert figures["machine"] and len(table["rows"]) == 2
    assert len(table["columns"]) == 5 + 3 * len(bench.RIVALS)
    for _, loop, bare, on_top, rate, *rivals in table["rows"]:
        assert 0 < bare[0] < 1000 and on_top[0] == pytest.approx(100 * (loop[0] / bare[0] - 1))
        assert 0 < rate[0] < 100
        for milliseconds, factor in zip(rivals[::3], rivals[1::3]):
            assert factor[0] == pytest.approx(milliseconds[0] / loop[0])
    assert capsys.readouterr().out.count("\n| ") == 4


def test_the_parts_of_a_step_are_all_of_its_products_and_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "turn", lambda call, *_: functools.partial(once, call))
    bench.main(["--rounds", "1", "--only", "where", "--json", str(tmp_path / "figures.json")])
    table, = json.loads((tmp_path / "figures.json").read_text())["tables"]
    for _, step, products, other, rest, _ in table["rows"]:
        assert step[0] == pytest.approx(products[0] + other[0] + rest[0])
        assert products[0] > 0 and other[0] > 0
    mlp, gpt = (bench.recorded_step(bench.prepare(kind)) for kind in ("mlp", "gpt"))
    assert len(mlp["products"]) == 2 + 2 * 2
    assert len(gpt["products"]) == 4 * 4 + 1 + 2 * (4 * 4 + 1)
    names = [function.__name__ for function, *_ in mlp["other"]]
    assert names == ["embedding", "add_bias", "batchnorm", "tanh", "add_bias", "cross_entropy",
                     "cross_entropy_backward", "sum_rows", "tanh_backward", "batchnorm_backward",
                     "sum_rows", "add_at", "adam"]


def once(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@pytest.mark.parametrize("name", bench.RIVALS)
@pytest.mark.parametrize("given", [
    dict(kind="mlp", optimizer="sgd", lr=0.1), dict(kind="mlp"), dict(kind="gpt", batch=8)])
def test_rivals_take_the_same_steps(name, given):
    job, other_values, other_rate = (bench.prepare(**given, steps=20) for _ in range(3))
    for way, steps in bench.RIVALS[name](job, 1).items():
        bench.check_same_work(job, way, steps)
    for w in other_values.run.p.values():
        w *= 2
    other_rate.config["lr"] *= 1.5
    for other in other_values, other_rate:
        for way, steps in bench.RIVALS[name](other, 1).items():
            with pytest.raises(AssertionError):
                bench.check_same_work(job, way, steps)


def test_of_the_ways_to_add_only_the_line_that_looks_right_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "turn", functools.partial(bench.turn, seconds=1e-5))
    bench.main(["--rounds", "1", "--scatter", "--json", str(tmp_path / "figures.json")])
    adding, fetching, dense = json.loads((tmp_path / "figures.json").read_text())["tables"]
    assert {way: right for way, right, *_ in adding["rows"]} == {
        "the double loop in Python": "right",
        "np.add.at(dC, X, demb)": "right",
        "dC += onehot(X).T @ demb": "right",
        "embedding_backward(demb, X, dC)": "right",
        **({"dC.index_add_(0, X, demb), PyTorch": "right"} if bench.torch else {}),
        "dC[X] += demb": "wrong"}
    assert [right for _, right, *_ in fetching["rows"]] == ["right", "right"]
    assert len(dense["rows"]) == 5
    assert all(time[0] > 0 for table in (adding, fetching) for row in table["rows"]
               for time in row[2:])
