"""Tests of tables of results."""

from tools.tables import fill, pipes, table

COLUMNS = {"name": lambda row: row["name"], "value": lambda row: row.get("value"), "other": lambda row: None}


def test_columns_without_values_are_left_out():
    rows = [{"name": "a", "value": "1"}, {"name": "b"}]
    assert fill(COLUMNS, rows) == (["name", "value"], [["a", "1"], ["b", "-"]])
    assert fill(COLUMNS, rows[1:]) == (["name"], [["b"]])


def test_a_table_without_rows_has_all_columns():
    header, cells = fill(COLUMNS, [])
    assert header == ["name", "value", "other"]
    assert table(header, cells).splitlines() == ["name  value  other", "----  -----  -----"]
    assert pipes(header, cells, text=("name",)) == "|name|value|other|\n|---|--:|--:|"
