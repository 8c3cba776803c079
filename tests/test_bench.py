import json

import pytest

import bench


@pytest.mark.slow
def test_a_table_and_its_figures(tmp_path, capsys):
    bench.main(["--rounds", "1", "--only", "loop", "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())
    table, = figures["tables"]
    assert figures["machine"] and len(table["rows"]) == 3
    assert all(value > 0 for row in table["rows"] for value in row[1] + row[2] + row[3])
    assert capsys.readouterr().out.count("\n| ") == 5
