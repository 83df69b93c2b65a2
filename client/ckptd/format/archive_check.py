"""What an archive must be before torch is given its bytes."""

from __future__ import annotations

from ckptd.format.archive_records import Record, first_record, read_records
from ckptd.format.pickle_check import check_pickle


def check_archive(data: bytes | memoryview, where: str, *, ours: bool) -> dict[str, Record]:
    """Refuse an archive that could end the process, or ask for memory or time without bound, while torch reads it.

    Args:
        data: The whole file.
        where: Its path, for messages.
        ours: Whether our writer is the only one that makes such files; False for format v1.

    Returns:
        Its records, by name.

    Raises:
        CorruptCheckpoint: It is no such archive. Nothing of it was made or called.
    """
    records = read_records(data, where)
    place = records["data.pkl"]
    pickle = bytes(data[place.offset : place.offset + place.nbytes])
    check_pickle(pickle, {name: record.nbytes for name, record in records.items()}, where, ours=ours)
    return records


def check_head(head: bytes | bytearray, where: str) -> None:
    """Refuse a shard whose pickle isn't ours. Nobody reads it here: the table says where the tensors are.

    Args:
        head: The bytes of the file before its first tensor's.
        where: Its path, for messages.

    Raises:
        CorruptCheckpoint: It holds something else than a shard does.
    """
    check_pickle(bytes(first_record(head, where)), None, where, ours=True)
