"""Small PDFs, written by hand."""

from __future__ import annotations

import zlib


def pdf_of(pages: list[str], *, compress: bool = False) -> bytes:
    """A PDF with a line of text on each page."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b""]
    kids = []
    objects.append(b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    for text in pages:
        stream = f"BT /F1 12 Tf 40 700 Td ({text}) Tj ET".encode("latin-1")
        filters = b""
        if compress:
            stream, filters = zlib.compress(stream), b" /Filter /FlateDecode"
        number = len(objects) + 1
        kids.append(f"{number} 0 R")
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R"
            b" /Resources << /Font << /F1 3 0 R >> >> >>" % (number + 1)
        )
        objects.append(b"<< /Length %d%b >>\nstream\n%b\nendstream" % (len(stream), filters, stream))
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(pages)} >>".encode()
    return file_of(objects)


def bomb(nbytes: int) -> bytes:
    """A PDF of some kilobytes whose only page's content unpacks to `nbytes`."""
    packer = zlib.compressobj(1)
    piece = b" " * 2**20
    stream = b"".join(packer.compress(piece) for _ in range(nbytes // len(piece))) + packer.flush()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R >>",
        b"<< /Length %d /Filter /FlateDecode >>\nstream\n%b\nendstream" % (len(stream), stream),
    ]
    return file_of(objects)


def file_of(objects: list[bytes]) -> bytes:
    """A PDF of these objects, the first one its catalog."""
    made, places = bytearray(b"%PDF-1.7\n"), []
    for number, one in enumerate(objects, 1):
        places.append(len(made))
        made += b"%d 0 obj\n%b\nendobj\n" % (number, one)
    start = len(made)
    made += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    made += b"".join(b"%010d 00000 n \n" % place for place in places)
    made += b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)
    return bytes(made)
