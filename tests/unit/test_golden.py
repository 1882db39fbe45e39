"""The golden digests run the release at the start with the settings that it knows, whatever they are called since."""

from golden.side import Case, renamed, settings_of

CASE = Case("of a test", "train", ("data.processes=1", "store=mapped", "check=true"))


def test_settings_are_renamed_for_this_release_and_not_for_the_start(monkeypatch):
    names = {"data.processes": "data.readers", "store=mapped": "store=files", "check": None}
    for before, since in names.items():
        monkeypatch.setitem(renamed.__globals__["RENAMED"], before, since)
    assert settings_of(CASE, now=False)[-3:] == ["data.processes=1", "store=mapped", "check=true"]
    assert settings_of(CASE, now=True)[-2:] == ["data.readers=1", "store=files"]
