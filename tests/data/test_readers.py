import logging
import re
from unicodedata import normalize

import pytest

from wan_ds.data.readers import FolderWithCaptions, detect
from wan_ds.errors import DataError


def put(folder, files):
    """Files by their name below the folder, with their contents."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_every_video_comes_with_its_caption_sorted_by_relative_path(tmp_path):
    put(
        tmp_path,
        {
            "b.mp4": "",
            "b.txt": "bee",
            "a/1.mp4": "",
            "a/1.txt": "one in a",
            "c/1.MOV": "",
            "c/1.TXT": "one in c",
            "a/deep/er/x.webm": "",
            "a/deep/er/x.txt": "deep",
            "B.mp4": "",
            "B.txt": "big bee",
        },
    )
    clips = FolderWithCaptions()(tmp_path)
    assert [(clip.key, clip.caption) for clip in clips] == [
        ("B.mp4", "big bee"),
        ("a/1.mp4", "one in a"),
        ("a/deep/er/x.webm", "deep"),
        ("b.mp4", "bee"),
        ("c/1.MOV", "one in c"),
    ]
    assert all(clip.path == tmp_path / clip.key and clip.start_seconds == 0 for clip in clips)


@pytest.mark.parametrize(
    ("content", "caption"),
    [
        (b"a cat", "a cat"),
        (b"\xef\xbb\xbfa cat\r\n", "a cat"),
        (b"a cat,\nthen\r\n\r\n  a dog\n\n", "a cat, then a dog"),
        (b'a cat, says "hi";\tit runs', 'a cat, says "hi"; it runs'),
        ("日本の猫".encode(), "日本の猫"),
    ],
)
def test_the_lines_of_a_caption_are_joined_by_one_space(tmp_path, content, caption):
    put(tmp_path, {"a.mp4": "", "a.txt": content})
    assert FolderWithCaptions()(tmp_path)[0].caption == caption


@pytest.mark.parametrize("stem", ["日本 é #1%[x]'\"=", "two  spaces", "%s %d {0}", "v1.2.final", "🎬", "*?"])
def test_any_name_pairs_with_its_caption(tmp_path, stem):
    put(tmp_path, {f"{stem}.mp4": "", f"{stem}.txt": "a cat"})
    (clip,) = FolderWithCaptions()(tmp_path)
    assert clip.key == f"{stem}.mp4"
    assert clip.path.exists()


@pytest.mark.parametrize("stem", ["%s %d {0}", "100% [x]"])
def test_odd_names_also_stand_in_errors(tmp_path, stem):
    folder = put(tmp_path / stem, {f"{stem}.mp4": ""})
    with pytest.raises(DataError, match=re.escape(f"{stem}.txt")):
        FolderWithCaptions()(folder)


def test_a_caption_named_in_the_other_unicode_form_is_found(tmp_path):
    put(tmp_path, {normalize("NFD", "café.mp4"): "", normalize("NFC", "café.txt"): "a cafe"})
    assert FolderWithCaptions()(tmp_path)[0].caption == "a cafe"


def test_videos_without_a_caption_are_named_up_to_five(tmp_path):
    put(tmp_path, {f"{n}.mp4": "" for n in range(7)} | {"3.txt": "three"})
    with pytest.raises(DataError) as error:
        FolderWithCaptions()(tmp_path)
    message = str(error.value)
    assert "6 videos without a caption: 0.mp4, 1.mp4, 2.mp4, 4.mp4, 5.mp4 and 1 more" in message
    assert "0.txt" in message


def test_an_empty_caption_is_refused(tmp_path):
    put(tmp_path, {"a.mp4": "", "a.txt": " \n\n", "b.mp4": "", "b.txt": "bee"})
    with pytest.raises(DataError, match=r"1 empty captions: a\.txt;"):
        FolderWithCaptions()(tmp_path)


def test_two_videos_that_would_share_a_caption_are_refused(tmp_path):
    put(tmp_path, {"x/a.mp4": "", "x/a.mov": "", "x/a.txt": "a cat", "a.mp4": "", "a.txt": "another"})
    with pytest.raises(DataError, match=r"2 videos share their name.*x/a\.mov, x/a\.mp4"):
        FolderWithCaptions()(tmp_path)


def test_a_caption_that_is_not_utf8_is_named(tmp_path):
    put(tmp_path, {"a.mp4": "", "a.txt": "café".encode("latin-1")})
    with pytest.raises(DataError, match=r"a\.txt.*UTF-8"):
        FolderWithCaptions()(tmp_path)


def test_a_caption_without_a_video_is_logged_and_not_used(tmp_path, caplog):
    put(tmp_path, {"a.mp4": "", "a.txt": "a cat", "notes.txt": "to do"})
    with caplog.at_level(logging.WARNING):
        assert [clip.key for clip in FolderWithCaptions()(tmp_path)] == ["a.mp4"]
    assert "notes.txt" in caplog.text


def test_what_begins_with_a_dot_is_passed_over(tmp_path):
    put(tmp_path, {"a.mp4": "", "a.txt": "a cat", "._a.mp4": "", ".cache/b.mp4": ""})
    assert [clip.key for clip in FolderWithCaptions()(tmp_path)] == ["a.mp4"]


def test_linked_folders_are_read_and_circles_end(tmp_path):
    put(tmp_path / "there", {"a.mp4": "", "a.txt": "a cat"})
    here = tmp_path / "here"
    here.mkdir()
    (here / "linked").symlink_to(tmp_path / "there")
    (here / "linked" / "back").symlink_to(here)
    assert [clip.key for clip in FolderWithCaptions()(here)] == ["linked/a.mp4"]


def test_extensions_are_options(tmp_path):
    put(tmp_path, {"a.gif": "", "a.caption": "a cat", "b.mp4": ""})
    clips = FolderWithCaptions(extensions=["gif"], caption_extension=".caption")(tmp_path)
    assert [(clip.key, clip.caption) for clip in clips] == [("a.gif", "a cat")]


def test_no_folder_a_file_and_no_videos_are_told_apart(tmp_path):
    put(tmp_path, {"in/a.mp4": "", "in/a.txt": "a cat"})
    (tmp_path / "none").mkdir()
    for read in (FolderWithCaptions(), detect):
        with pytest.raises(DataError, match=r"missing: there is no such folder"):
            read(tmp_path / "missing")
        with pytest.raises(DataError, match=rf"a\.mp4 is a file.*{re.escape(str(tmp_path / 'in'))}$"):
            read(tmp_path / "in" / "a.mp4")
    with pytest.raises(DataError, match=r"none: there is no video"):
        FolderWithCaptions()(tmp_path / "none")


def test_a_folder_of_videos_with_captions_is_detected(tmp_path):
    put(tmp_path, {"a.mp4": "", "a.txt": "a cat", "metadata.csv": "video,prompt\n"})
    assert [clip.key for clip in detect(tmp_path)(tmp_path)] == ["a.mp4"]


@pytest.mark.parametrize(
    "name",
    ["metadata.csv", "metadata.jsonl", "shards/00000.tar", "data.parquet", "dataset.toml", "captions.json"],
)
def test_another_format_is_named_with_the_ways_on(tmp_path, name):
    put(tmp_path, {name: "x", "a.mp4": ""})
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(DataError) as error:
            detect(path)
        assert name.split("/")[-1] in str(error.value)
        assert ".txt captions" in str(error.value)
        assert "data.reader" in str(error.value)


def test_a_folder_of_bare_videos_is_told_about_captions(tmp_path):
    put(tmp_path, {"a.mp4": ""})
    with pytest.raises(DataError, match=r"without a caption: a\.mp4"):
        detect(tmp_path)(tmp_path)
