"""The archive finds what was said, by the words of a question, and for its owner only."""

from __future__ import annotations

import sqlite3
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

import weir
from weir.errors import WeirError
from weir.stream.archive import (
    PASSAGE,
    ArchivedTurn,
    ArchiveProblem,
    ArchiveTables,
    cut_passages,
    cut_sentences,
    find_inquiries,
)
from weir.stream.archive.ranking import ArchiveSearch


def fill(archive: weir.Archive, *texts: str, role: str = "user") -> weir.Archive:
    """Add turns of ten positions each."""
    for text in texts:
        start = 10 * archive.turns
        archive.add(role, text, start=start, stop=start + 10)
    return archive


def found(archive: weir.Archive, question: str, **how: object) -> list[str]:
    """Return the texts that a question finds."""
    return [one.text for one in archive.search(question, **how)]  # type: ignore[arg-type]


CODE = "The secret access code of Alice Moreau is 48213."
ANIMAL = "The favourite animal of Zoe Finch is the otter."


# --- passages


@pytest.mark.parametrize(
    "text",
    [
        "One. Two! Three? Four",
        "a" * 5000,
        "word " * 1000,
        "今日は。明日は！" * 200,
        "\n\n  x\n\ny  ",
        "",
        "line\n" * 300,
        "a" + " " * 5_000 + "b" * 3_000,
        'He said "Stop." Then he left... and came back.',
    ],
)
def test_passages_are_the_text_and_within_their_size(text):
    passages = cut_passages(text)
    assert "".join(passages) == text
    assert "".join(cut_sentences(text)) == text
    assert all(len(one.rstrip()) <= PASSAGE for one in passages)


def test_passages_end_where_sentences_do():
    text = " ".join(f"This is sentence number {n} of a text." for n in range(60))
    passages = cut_passages(text)
    assert len(passages) > 4
    assert all(one.rstrip().endswith(".") for one in passages)
    # Each passage has as many whole sentences as fit.
    assert all(len(a) + len(cut_sentences(b)[0]) > PASSAGE for a, b in pairwise(passages))


def test_decimal_points_end_no_sentence():
    assert cut_sentences("It costs 3.50 dollars. Yes.") == ["It costs 3.50 dollars. ", "Yes."]


# --- what is found


def test_a_fact_is_found_among_others():
    archive = fill(weir.Archive(), "Hello there.", CODE, ANIMAL, "The weather is fine today.")
    assert found(archive, "What is the secret access code of Alice Moreau?") == [CODE]
    assert found(archive, "Which animal does Zoe Finch like best?") == [ANIMAL]


def test_a_name_alone_finds_what_was_said_of_it():
    archive = fill(weir.Archive(), CODE, ANIMAL)
    assert found(archive, "Which digits must I type in for Alice Moreau?") == [CODE]


def test_a_question_about_somebody_else_finds_nothing():
    archive = fill(weir.Archive(), CODE, ANIMAL)
    assert found(archive, "What is the secret access code of Robert Dale?") == []


@pytest.mark.parametrize(
    "said",
    [
        "Hello!",
        "Thank you.",
        "Why?",
        "",
        "   ",
        "?!",
        "Write a poem about the sea.",
        "🙂🙂🙂",
        "of the",
    ],
)
def test_a_turn_that_asks_for_nothing_finds_nothing(said):
    archive = fill(weir.Archive(), CODE, ANIMAL, "I wrote you something.")
    assert found(archive, said) == []


def test_a_short_number_alone_asks_for_nothing():
    archive = fill(weir.Archive(), "2022-02-02, 163.10, 165.40", "Room 10 is locked.", CODE)
    assert found(archive, "What about |x + 10| < 5") == []
    assert found(archive, "Is room 10 open?") == ["Room 10 is locked."]
    assert found(archive, "Who has 48213?") == [CODE]


def test_words_are_found_in_other_forms():
    archive = fill(weir.Archive(), "The engineers of the bridge were walking to Coventry.", ANIMAL)
    assert found(archive, "Where did the bridge engineer walk?") != []


@pytest.mark.parametrize(
    "now",
    [
        "The secret access code of Alice Moreau is now 99999.",
        "The secret access code of Alice Moreau is 99999.",
        "Sorry, Alice Moreau's secret access code was changed: 99999.",
    ],
)
def test_a_later_statement_takes_the_place_of_the_earlier_one(now):
    archive = fill(weir.Archive(), CODE, ANIMAL, now, "The weather is fine today.")
    assert found(archive, "What is the secret access code of Alice Moreau?") == [now]


def test_a_statement_that_adds_to_an_earlier_one_comes_before_it():
    more = "Alice Moreau also has the secret access code 99999."
    archive = fill(weir.Archive(), CODE, ANIMAL, more, "The weather is fine today.")
    assert found(archive, "What is the secret access code of Alice Moreau?") == [more, CODE]


def test_values_of_one_turn_and_of_tools_are_all_found():
    both = f"{CODE} {'And so on and so on. ' * 20}The secret access code of Alice Moreau is 11111."
    archive = fill(weir.Archive(), both)
    texts = " ".join(found(archive, "What is the secret access code of Alice Moreau?"))
    assert "48213" in texts and "11111" in texts
    archive = weir.Archive()
    fill(archive, CODE, "The secret access code of Alice Moreau is 11111.", role="tool")
    assert len(found(archive, "What is the secret access code of Alice Moreau?")) == 2


def test_what_the_model_said_does_not_come_before_what_the_user_said():
    archive = fill(weir.Archive(), CODE)
    fill(archive, "The secret access code of Alice Moreau is 11111.", role="assistant")
    assert found(archive, "What is the secret access code of Alice Moreau?") == [CODE]


def test_duplicates_are_found_once():
    archive = fill(weir.Archive(), f"Please remember this: {CODE}", ANIMAL, CODE)
    fill(archive, f"I will remember this: {CODE}", role="assistant")
    assert len(found(archive, "What is the secret access code of Alice Moreau?")) == 1


def test_an_earlier_question_does_not_come_before_its_answer():
    question = "What is the secret access code of Alice Moreau?"
    archive = fill(weir.Archive(), CODE, question, ANIMAL, question)
    assert found(archive, question)[0] == CODE


def test_a_question_that_was_asked_often_does_not_hide_its_answer():
    asked = "What is the secret access code of Alice Moreau?"
    archive = fill(weir.Archive(), CODE, *(asked for _ in range(100)))
    assert found(archive, asked) == [CODE]


def test_several_questions_of_one_turn_are_answered():
    archive = fill(weir.Archive(), CODE, ANIMAL, "The rain falls.")
    text = "What is the secret access code of Alice Moreau? And which animal does Zoe Finch like?"
    assert set(found(archive, text)) == {CODE, ANIMAL}


def test_statements_that_have_one_name_each_answer_a_question_about_both():
    other = "The secret access code of Robert Dale is 71094."
    archive = fill(weir.Archive(), CODE, other, ANIMAL)
    asked = "What came first, the secret code of Robert Dale or that of Alice Moreau?"
    assert found(archive, asked) == [other, CODE]
    assert found(archive, "What came first, the code of Zara Holt or that of Ian Wood?") == []
    # A statement that has both names is the better answer, also while the cache holds it.
    both = "The codes of Robert Dale and Alice Moreau were told first to Zoe."
    fill(archive, both)
    assert found(archive, asked) == [both]
    assert found(archive, asked, is_held=lambda start, stop: start == 30) == []


def test_the_name_may_be_in_the_sentence_before():
    archive = fill(weir.Archive(), CODE, ANIMAL)
    assert found(archive, "I am about to call Alice Moreau. What was the code again?") == [CODE]


def test_a_pasted_text_is_not_searched_for_but_the_question_after_it_is():
    archive = fill(weir.Archive(), CODE, ANIMAL)
    pasted = "Zoe Finch went to the sea with an otter. " * 300
    assert found(archive, pasted) == []
    assert found(archive, f"{pasted}\n\nWhat is the secret access code of Alice Moreau?") == [CODE]


def test_short_passages_come_with_their_neighbours():
    text = f"{'Filler of the start. ' * 16}The key of Anna Quist lies here. It is made of brass."
    archive = fill(weir.Archive(), text, ANIMAL)
    (one,) = archive.search("Where does the key of Anna Quist lie?")
    assert "made of brass" in one.text


@pytest.mark.parametrize(
    ("told", "question"),
    [
        ("我的猫叫小白。", "我的猫叫什么？"),
        ("田中さんの誕生日は三月です。", "田中さんの誕生日はいつですか？"),
        ("รหัสของประตูคือ 1234", "รหัสของประตูคืออะไร?"),
        ("मेरी बिल्ली का नाम मीना है।", "मेरी बिल्ली का नाम क्या है?"),
        (
            "Der Schlüssel von Jürgen liegt unter der Fußmatte.",
            "Wo liegt der Schluessel von Jürgen?",
        ),
        ("Ключ от сарая лежит под камнем.", "Где лежит ключ от сарая?"),
        ("مفتاح البيت تحت الحجر", "أين مفتاح البيت؟"),
    ],
)
def test_other_languages_and_scripts(told, question):
    archive = fill(weir.Archive(), CODE, told, ANIMAL, "一二三四五六。", "Просто слова.")
    assert told in found(archive, question)


# --- positions in the stream


def test_what_is_held_is_left_out():
    archive = fill(weir.Archive(), CODE, ANIMAL)
    (one,) = archive.search("What is the secret access code of Alice Moreau?")
    assert (one.start, one.stop, one.role) == (0, 10, "user")
    assert not found(archive, one.text + "?", is_held=lambda start, stop: stop <= 10)
    assert found(archive, one.text + "?", is_held=lambda start, stop: start >= 10)


def test_what_is_held_takes_the_place_of_what_it_contradicts():
    old, new = CODE, CODE.replace("48213", "now 70001")
    archive = fill(weir.Archive(), old, ANIMAL, new)
    asked = "What is the secret access code of Alice Moreau?"
    assert found(archive, asked) == [new]
    # The model reads the new statement in its cache. The old one would mislead it.
    assert found(archive, asked, is_held=lambda start, stop: start == 20) == []
    assert found(archive, asked, is_held=lambda start, stop: start == 0) == [new]


def test_what_answers_worse_than_what_is_held_is_not_brought_back():
    intro = "A special magic number is hidden within the following text. Memorize the number."
    needle = "One of the special magic numbers for jittery-hospital is: 5437923."
    archive = fill(weir.Archive(), intro, "The grass is green.", needle, role="text")
    asked = "What is the special magic number for jittery-hospital in the provided text?"
    assert found(archive, asked) == [needle, intro]
    assert found(archive, asked, is_held=lambda start, stop: start == 20) == []
    assert found(archive, asked, is_held=lambda start, stop: start == 0) == [needle]


def test_passages_of_a_long_turn_have_their_own_places():
    archive = weir.Archive()
    text = "Nothing of interest is said here at all. " * 100 + CODE
    archive.add("user", text, start=0, stop=1000)
    (one,) = archive.search("What is the secret access code of Alice Moreau?")
    assert one.start > 850 and one.stop == 1000


def test_after_resuming_later_positions_are_in_no_cache():
    archive = fill(weir.Archive(), CODE, ANIMAL)
    archive.resume(10)
    held = lambda start, stop: True  # noqa: E731
    assert found(archive, "What is the secret access code of Alice Moreau?", is_held=held) == []
    assert found(archive, "Which animal does Zoe Finch like?", is_held=held) == [ANIMAL]


# --- sessions and owners


def test_a_fork_sees_what_came_before_it_and_not_its_sibling():
    archive = fill(weir.Archive(), CODE)
    fork = archive.fork("other")
    fill(archive, ANIMAL)
    fill(fork, "The boat of Peter Tanner was built in 1764.")
    assert found(fork, "What is the secret access code of Alice Moreau?") == [CODE]
    assert found(archive, "What is the secret access code of Alice Moreau?") == [CODE]
    assert found(fork, "Which animal does Zoe Finch like?") == []
    assert found(archive, "In which year was the boat of Peter Tanner built?") == []
    assert found(fork, "In which year was the boat of Peter Tanner built?") != []


def test_a_fork_of_a_fork_sees_all_its_ancestors_to_where_it_forked():
    archive = fill(weir.Archive(), CODE)
    second = fill(archive.fork("second"), ANIMAL)
    third = second.fork("third")
    fill(second, "The boat of Peter Tanner was built in 1764.")
    fill(archive, "The house number of Mary Holt is 12.")
    fill(third, "The boat of Peter Tanner was sold.")
    assert found(third, "What is the secret access code of Alice Moreau?") == [CODE]
    assert found(third, "Which animal does Zoe Finch like?") == [ANIMAL]
    assert found(third, "What is the house number of Mary Holt?") == []
    assert found(third, "What of the boat of Peter Tanner?") == [
        "The boat of Peter Tanner was sold."
    ]
    with pytest.raises(WeirError, match="a session 'second' already exists"):
        archive.fork("second")


def test_deleting_a_session_deletes_what_only_it_has():
    archive = fill(weir.Archive(), CODE)
    fork = fill(archive.fork("other"), ANIMAL)
    archive.delete()
    assert archive.search("What is the secret access code of Alice Moreau?") == []
    assert found(fork, "What is the secret access code of Alice Moreau?") == [CODE]
    fork.delete()
    assert fork.turns == 0
    for table in ("branches", "ends", "turns", "passages", "owners"):
        assert fork._query(f"SELECT count(*) FROM archived_{table}")[0][0] == 0
    for index in ("english", "plain"):
        assert not fork._query(f"SELECT * FROM archived_{index}('otter OR code OR t1')")


@pytest.mark.parametrize("seen", [30, 25, 20, 10, 0])
def test_a_fork_goes_back_to_before_it_was_forked(seen):
    """Rewinding removes turns from the fork only, and later turns can follow at the same places."""
    texts = [CODE, ANIMAL, "The boat of Peter Tanner was built in 1764."]
    questions = [
        "What is the secret access code of Alice Moreau?",
        "Which animal does Zoe Finch like?",
        "In which year was the boat of Peter Tanner built?",
    ]
    archive = fill(weir.Archive(), *texts[:2])
    fork = archive.fork("other")
    fill(archive, "The house number of Mary Holt is 12.")
    fork.add("user", texts[2], start=20, stop=30)
    fork.rewind(seen)
    stays = -(-seen // 10)
    for number, (text, question) in enumerate(zip(texts, questions, strict=True)):
        assert found(fork, question) == ([text] if number < stays else [])
        assert found(archive, question) == ([text] if number < 2 else [])
    assert found(archive, "What is the house number of Mary Holt?") != []
    assert found(fork, "What is the house number of Mary Holt?") == []
    fork.add("user", "The dog of Anna Berg is called Rufus.", start=seen, stop=seen + 10)
    assert found(fork, "What is the dog of Anna Berg called?") != []
    assert found(archive, "What is the dog of Anna Berg called?") == []


def test_a_session_that_goes_on_leaves_the_places_of_other_sessions():
    archive = fill(weir.Archive(), CODE)
    fork = archive.fork("other")
    fork.add("user", ANIMAL, start=10, stop=20)
    archive.add("user", "The boat of Peter Tanner was built in 1764.", start=10, stop=20)
    archive.resume(10)
    places = {
        text: (start, stop)
        for text, start, stop in archive._query("SELECT text, start, stop FROM archived_passages")
    }
    assert places[CODE] == (0, 10) and places[ANIMAL] == (10, 20)
    assert list(places.values())[2] == (-1, -1)


def test_sessions_of_one_file_do_not_see_each_other(tmp_path):
    with fill(weir.Archive(tmp_path / "a.db", "one"), CODE):
        pass
    with fill(weir.Archive(tmp_path / "a.db", "two"), ANIMAL) as two:
        assert found(two, "What is the secret access code of Alice Moreau?") == []
        assert found(two, "Which animal does Zoe Finch like?") == [ANIMAL]
    with weir.Archive(tmp_path / "a.db", "one") as one:
        assert found(one, "What is the secret access code of Alice Moreau?") == [CODE]


def test_another_owner_sees_and_deletes_nothing():
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.row_factory = sqlite3.Row
    tables = ArchiveTables()
    tables.create(db)

    def query(text: str, *values: object) -> list[sqlite3.Row]:
        return db.execute(text, values).fetchall()

    tables.add(db, "alice", "turn", None, [ArchivedTurn("user", CODE)])
    end = tables.find_end(query, "alice", "turn")
    assert end is not None
    questions = find_inquiries("What is the secret access code of Alice Moreau?")
    held = lambda start, stop: False  # noqa: E731
    assert ArchiveSearch(query, "alice", end).search(questions, held, 8)
    # Another owner finds nothing, even with the end of this owner's turn.
    assert ArchiveSearch(query, "mallory", end).search(questions, held, 8) == []
    assert tables.find_end(query, "mallory", "turn") is None
    tables.forget(db, "mallory", ["turn"])
    tables.unplace(db, "mallory", end, -1)
    tables._delete_turns(db, "mallory", [1])
    assert ArchiveSearch(query, "alice", end).search(questions, held, 8)


def test_whoever_has_most_loses_the_oldest_turns():
    db = sqlite3.connect(":memory:", isolation_level=None)
    tables = ArchiveTables(100_000)
    tables.create(db)
    tables.add(db, "small", "turn", None, [ArchivedTurn("user", CODE)])
    dropped = 0
    for n in range(400):
        dropped += tables.add(db, "hog", f"{n}", None, [ArchivedTurn("user", f"{n} {CODE}" * 4)])
    assert dropped
    kept = dict(db.execute("SELECT owner, count(*) FROM archived_turns GROUP BY owner").fetchall())
    assert kept["small"] == 1 and kept["hog"] == 400 - dropped
    oldest = db.execute("SELECT min(text) FROM archived_passages WHERE owner = 'hog'").fetchone()
    assert oldest is not None and not oldest[0].startswith("0 ")
    (size,) = db.execute("SELECT sum(bytes) FROM archived_owners").fetchone()
    assert size <= 100_000


def test_the_limit_bounds_the_file(tmp_path):
    limit = 400_000
    with weir.Archive(tmp_path / "a.db", limit=limit) as archive:
        for n in range(1500):
            archive.add("user", f"Number {n}: the word is w{n * 7919 % 10007}. {ANIMAL} " * 3)
        assert archive.dropped > 0
        assert found(archive, "What is the word of number 1499?") != []
        assert found(archive, "What is w7919?") == []
        archive._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert (tmp_path / "a.db").stat().st_size < 1.25 * limit


def test_a_turn_larger_than_the_limit_is_not_kept():
    archive = weir.Archive(limit=10_000)
    fill(archive, CODE, "x " * 20_000, ANIMAL)
    assert archive.turns == 2


# --- hostile text


@pytest.mark.parametrize(
    "text",
    [
        '" OR words:"code" --',
        "tree : t1 AND words : *",
        "NEAR(code alice, 5)?",
        "What is {tree words} : (code) ^alice * ?",
        "'; DROP TABLE archived_turns; --?",
        "What is \x00 the \x00 code?",
        "What is \ud800 the code \udfff?",
        "code " * 20_000 + "?",
        "?" * 100_000,
        "What is x? " * 9_000,
        "(" * 100_000,
        "a\u0301" * 50_000,
        "𝔘𝔫𝔦𝔠𝔬𝔡𝔢?",
        "ﬁﬂ ½ ² ⅷ?",
    ],
)
def test_any_text_is_a_harmless_question_and_a_harmless_turn(text):
    archive = fill(weir.Archive(), CODE)
    began = time.thread_time()
    archive.search(text)
    archive.add("user", text)
    archive.search(text)
    # Quadratic work in this text would take minutes.
    assert time.thread_time() - began < 20
    assert CODE in found(archive, "What is the secret access code of Alice Moreau?")
    archive.delete()
    assert archive.turns == 0


def test_a_long_question_is_searched_for_in_bounded_time():
    archive = fill(weir.Archive(), *(f"Name{n} has number {n}." for n in range(300)))
    text = " ".join(f"What is the number of Name{n}?" for n in reversed(range(4000)))
    assert len(text) > 100_000
    queries = 0
    asked = archive._query

    def count(query: str, *values: object) -> list[sqlite3.Row]:
        nonlocal queries
        queries += 1
        return asked(query, *values)

    archive._query = count  # type: ignore[method-assign]
    assert archive.search(text)
    assert queries < 60


# --- files


def test_a_file_is_opened_again(tmp_path):
    path = tmp_path / "a.db"
    with fill(weir.Archive(path), CODE):
        assert path.stat().st_mode & 0o777 == 0o600
    with weir.Archive(path) as again:
        assert found(again, "What is the secret access code of Alice Moreau?") == [CODE]


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "a.db"
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(ArchiveProblem, match="is damaged"):
        weir.Archive(path)


def test_damage_within_a_file_is_reported(tmp_path):
    path = tmp_path / "a.db"
    with fill(weir.Archive(path), *(f"{CODE} {n}" for n in range(400))):
        pass
    data = bytearray(path.read_bytes())
    data[4096 * 2 :] = b"\xff" * (len(data) - 4096 * 2)
    path.write_bytes(data)

    def use() -> None:
        archive = weir.Archive(path)
        archive.search("What is the secret access code of Alice Moreau?")
        archive.add("user", CODE)

    with pytest.raises(ArchiveProblem, match="is damaged"):
        use()


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "a.db"
    weir.Archive(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ArchiveProblem, match="this file has version 99"):
        weir.Archive(path)


def test_a_foreign_database_is_refused(tmp_path):
    path = tmp_path / "a.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE mine (x)")
    db.commit()
    db.close()
    with pytest.raises(ArchiveProblem, match="not an archive of this version"):
        weir.Archive(path)
    assert sqlite3.connect(path).execute("SELECT name FROM sqlite_master").fetchall() == [("mine",)]


def test_a_locked_file_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("weir.stream.archive.keeping.PATIENCE", 0.05)
    path = tmp_path / "a.db"
    with weir.Archive(path) as archive:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ArchiveProblem, match="is locked by another process"):
            archive.add("user", CODE)
        other.execute("ROLLBACK")
        archive.add("user", CODE)


def test_a_full_disk_is_reported_and_nothing_is_half_written(tmp_path):
    with fill(weir.Archive(tmp_path / "a.db"), ANIMAL) as archive:
        (pages,) = archive._query("PRAGMA page_count")[0]
        archive._db.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(ArchiveProblem, match="the disk is full"):
            archive.add("user", "\n".join(f"{CODE} {n}" for n in range(2000)))
        assert archive.turns == 1
        assert found(archive, "Which animal does Zoe Finch like?") == [ANIMAL]


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ArchiveProblem, match="cannot be opened"):
        weir.Archive(tmp_path / "missing" / "a.db")
    with pytest.raises(ArchiveProblem):
        weir.Archive(Path("/proc/version"))


def test_threads_may_share_an_archive(tmp_path):
    with weir.Archive(tmp_path / "a.db") as archive:

        def work(number: int) -> None:
            for n in range(20):
                archive.add("user", f"{CODE} {number} {n}")
                archive.search("What is the secret access code of Alice Moreau?")

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert archive.turns == 80
