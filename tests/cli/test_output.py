"""What the verbs share."""

from regard.cli._output import repeatable


def test_a_command_is_kept_without_the_places_of_folders() -> None:
    typed = [
        "sweep",
        "pairs",
        "--data",
        "/home/me/sick",
        "--set",
        "vectors=/home/me/glove",
        "--over",
        "seed=0,1",
        "--store=a/b.jsonl",
    ]
    kept = "regard sweep pairs --data DIR --set vectors=DIR --over seed=0,1 --store=FILE"
    assert repeatable(typed) == kept
    assert repeatable(["bench", "overhead", "--results", "/root/out"]) == "regard bench overhead --results DIR"
