"""Run as a program, isolated: the text of the PDF on its standard input, as one JSON object on its output.

A PDF is a foreign program for a parser: it may be built to take all time or memory. So it is read in a
process of its own that has limits of both, opens nothing, writes no file, and imports nothing of Samovar.

Arguments: bytes of address space, seconds of processor time, pages, characters. The object has `text` and
`pages`, or `error`: a sentence without its end. A process that was stopped by a limit says nothing.
"""

from __future__ import annotations

import io
import json
import resource
import sys


def text_of_pdf(data: bytes, pages_max: int, chars_max: int) -> dict[str, object]:
    """Return the text of a PDF, its pages divided by blank lines, or an `error`."""
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    try:
        reader = PdfReader(io.BytesIO(data), strict=False)
        if reader.is_encrypted and not reader.decrypt(""):
            return {"error": "it is encrypted, and needs a password"}
        pages = len(reader.pages)
        if pages > pages_max:
            return {"error": f"it has {pages} pages, more than {pages_max} (documents.pages_max)"}
        parts, chars = [], 0
        for page in reader.pages:
            text = page.extract_text()
            chars += len(text) + 2
            if chars > chars_max:
                return {"error": f"it has more than {chars_max} characters (documents.chars_max)"}
            parts.append(text.encode("utf-8", "replace").decode())
        return {"text": "\n\n".join(parts), "pages": pages}
    except MemoryError:
        return {"error": "reading it takes more memory than documents.pdf_bytes_max"}
    except (PyPdfError, RecursionError) as refused:
        return {"error": f"it is no readable PDF ({type(refused).__name__})"}
    except Exception as fault:  # noqa: BLE001 - whatever a broken file makes of a parser
        return {"error": f"it is no readable PDF ({type(fault).__name__})"}


def main(memory_bytes: int, cpu_s: int, pages_max: int, chars_max: int) -> None:
    """Set the limits of this process, then read."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))
    try:
        told = text_of_pdf(sys.stdin.buffer.read(), pages_max, chars_max)
    except ImportError:
        told = {"error": 'PDFs need pypdf, which is not installed: pip install "samovar[documents]"'}
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
