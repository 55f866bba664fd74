"""Turns Debian's King James Version into plain text for training: one chapter after another, one verse a line.

    apt-get install bible-kjv
    bible -l 100000 -f 'gen1:1-rev22:21' | python examples/kjv/prepare.py -o data/kjv

writes `train.txt` and `heldout.txt`. Whole books are held out, so that no chapter is seen in part. Books are separated
by a form feed, which the training script turns into the end-of-text token.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

BOOKS = {
    "Ge": "Genesis", "Exo": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deu": "Deuteronomy",
    "Josh": "Joshua", "Jdgs": "Judges", "Ruth": "Ruth", "Ezra": "Ezra", "Neh": "Nehemiah", "Est": "Esther",
    "Job": "Job", "Psa": "Psalm", "Prv": "Proverbs", "Eccl": "Ecclesiastes", "SSol": "Song of Solomon",
    "Isa": "Isaiah", "Jer": "Jeremiah", "Lam": "Lamentations", "Eze": "Ezekiel", "Dan": "Daniel",
    "Hos": "Hosea", "Joel": "Joel", "Amos": "Amos", "Obad": "Obadiah", "Jonah": "Jonah", "Mic": "Micah",
    "Nahum": "Nahum", "Hab": "Habakkuk", "Zep": "Zephaniah", "Hag": "Haggai", "Zec": "Zechariah",
    "Mal": "Malachi", "Mat": "Matthew", "Mark": "Mark", "Luke": "Luke", "John": "John", "Acts": "Acts",
    "Rom": "Romans", "Gal": "Galatians", "Eph": "Ephesians", "Phi": "Philippians", "Col": "Colossians",
    "Titus": "Titus", "Phmn": "Philemon", "Heb": "Hebrews", "Jas": "James", "Jude": "Jude", "Rev": "Revelation",
    "Sm": "Samuel", "Ki": "Kings", "Chr": "Chronicles", "Cor": "Corinthians", "Th": "Thessalonians",
    "Tim": "Timothy", "Pet": "Peter", "Jn": "John",
}  # fmt: skip
HELD_OUT = frozenset({"Ruth", "Esther", "Ecclesiastes", "Jonah", "Philippians", "James"})
_VERSE = re.compile(r"([1-3]?)([A-Za-z]+)(\d+):(\d+) (.*)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare the King James Version for training.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for train.txt and heldout.txt")
    output = parser.parse_args().output
    books: dict[str, list[str]] = {}
    chapter_seen = ""
    for line in sys.stdin:
        match = _VERSE.fullmatch(line.rstrip("\n"))
        if match is None:
            raise SystemExit(f"prepare: expected a verse like 'Ge1:1 In the …', found {line[:60]!r}")
        number, short, chapter, _, verse = match.groups()
        book = f"{number} {BOOKS[short]}".strip()
        heading = f"{book} {chapter}"
        text = books.setdefault(book, [])
        if heading != chapter_seen:
            text.append(f"\n{heading}\n" if text else f"{heading}\n")
            chapter_seen = heading
        text.append(f"{verse}\n")
    if len(books) != 66:
        raise SystemExit(f"prepare: expected 66 books on standard input, found {len(books)}")
    output.mkdir(parents=True, exist_ok=True)
    for name, held in (("train.txt", False), ("heldout.txt", True)):
        chosen = ["".join(text) for book, text in books.items() if (book in HELD_OUT) == held]
        (output / name).write_text("\f".join(chosen), encoding="utf-8")
        print(f"{output / name}: {len(chosen)} books, {sum(map(len, chosen)):,} characters")


if __name__ == "__main__":
    main()
