from __future__ import annotations

from pathlib import Path

import pytest
import synthetic_sass

from mlakern.build.compiler import Compiled
from mlakern.kernels.blackwell.layout import PAIR
from mlakern.performance import pipes
from mlakern.performance.disassembly import (
    DisassemblyError,
    Instruction,
    disassemble,
    functions,
)
from mlakern.performance.loops import FlowGraph
from mlakern.performance.model import B200, clocks, tile_work
from mlakern.performance.profile import main_loops


def synthetic(old: str = "", new: str = "") -> FlowGraph:
    """The synthetic kernel with a piece of it replaced."""
    lines = synthetic_sass.lines()
    assert old in lines
    return FlowGraph(functions(synthetic_sass.text(lines.replace(old, new)))[synthetic_sass.ENTRY])


class TestDisassembly:
    def test_functions_have_their_own_instructions(self) -> None:
        found = functions(synthetic_sass.text())
        assert {name: len(f.instructions) for name, f in found.items()} == {
            "attention_0": 48,
            "combine_1": 3,
        }
        first, second = found["attention_0"].instructions[:2]
        assert first == Instruction(0, "", "LDC", "R1, c[0x0][0x37c]")
        assert (second.address, second.name, second.target) == (16, "BRA", ".L_mma")
        assert found["attention_0"].labels[".L_softmax"] == 3

    @pytest.mark.parametrize(
        ("line", "falls_through"),
        [
            ("BRA `(.L_x_1) ;", False),
            ("@P0 BRA `(.L_x_1) ;", True),
            ("@!UP0 BRA `(.L_x_1) ;", True),
            ("BRA.U UP0, `(.L_x_1) ;", True),
            ("BRA.U !UP0, `(.L_x_1) ;", True),
            ("BRA P3, `(.L_x_1) ;", True),
            ("EXIT ;", False),
            ("@P0 EXIT ;", True),
            ("RET.REL.NODEC R2 `(f) ;", False),
            ("CALL.REL.NOINC `($g) ;", True),
            ("NOP;", True),
        ],
    )
    def test_where_control_goes(self, line: str, falls_through: bool) -> None:
        found = functions(f".text.f:\n        /*0000*/   {line}\n")
        (instruction,) = found["f"].instructions
        assert instruction.falls_through is falls_through
        assert instruction.target == (".L_x_1" if "BRA" in line else None)

    def test_text_without_functions_is_refused(self) -> None:
        with pytest.raises(DisassemblyError, match="got no function"):
            functions("nothing\n")

    def test_what_is_no_cubin_is_refused_with_the_tools_words(self) -> None:
        with pytest.raises(DisassemblyError, match=r"nvdisasm failed \(\d+\): .*\w"):
            disassemble(b"not a cubin")


class TestLoops:
    def test_a_loop_has_its_spinning_wait_and_not_its_neighbours(self) -> None:
        graph = synthetic()
        (loop,) = graph.innermost("LDTM.*x64")
        names = {i.opcode for number in loop.blocks for i in graph.block(number)}
        assert "MUFU.EX2" in names
        assert "IMAD" not in names  # of the item loop around it
        spins = [b for b in loop.blocks if graph.block(b)[0].name == "SYNCS"]
        assert len(spins) == 2

    def test_a_loop_of_one_block_and_the_loop_around_it(self) -> None:
        graph = synthetic()
        sizes = sorted(len(loop.blocks) for loop in graph.loops)
        # The spin and the value copies are one block each; items hold the softmax loop and a block
        # before and one after it.
        assert sizes[:2] == [1, 1]
        (softmax,) = graph.innermost("LDTM.*x64")
        (item,) = [x for x in graph.loops if x.blocks > softmax.blocks]
        assert len(item.blocks) == len(softmax.blocks) + 2

    def test_the_way_of_a_tile_without_mask_and_wait(self) -> None:
        graph = synthetic()
        (loop,) = graph.innermost("LDTM.*x64")
        opcodes = [i.opcode for i in graph.way(loop)]
        assert opcodes == [
            "SYNCS.PHASECHK.TRANS64.TRYWAIT",
            "BRA",
            "LDTM.x64",
            "BRA",
            "FMNMX3",
            "FFMA2",
            "MUFU.EX2",
            "MUFU.EX2",
            "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C",
            "STS.128",
            "BRA",
        ]
        # Three masking instructions and three of the failed wait.
        assert len(graph.longest_way(loop)) == len(opcodes) + 3 + 3

    def test_a_way_through_what_is_asked_for(self) -> None:
        graph = synthetic()
        (loop,) = graph.innermost("LDTM.*x64")
        assert [i.opcode for i in graph.way(loop, "FSEL")].count("FSEL") == 2

    def test_an_opcode_outside_of_loops_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"UTMALDG\.5D stands outside of any loop"):
            synthetic().innermost("UTMALDG.5D")


class TestMainLoops:
    def test_instructions_of_each_role_by_pipe(self) -> None:
        loops = main_loops(synthetic().function)
        assert {role: loop.counts for role, loop in loops.items()} == {
            "softmax": {
                **{"mufu": 2, "fma": 1, "alu": 1, "convert": 1, "shared": 1, "tmem": 1},
                **{"barrier": 1, "branch": 3},
            },
            "mma": {"tensor": 3, "branch": 3, "uniform": 1},
            "correction": {"shared": 1, "branch": 2},
            "rescale": {"fma": 1, "shared": 1, "tmem": 2, "branch": 2},
            "load_k": {"tma": 2, "branch": 2},
            "load_v": {"tma": 1, "branch": 1},
        }
        assert {role: loop.instructions for role, loop in loops.items()} == {
            **{"softmax": 11, "mma": 7, "correction": 3, "rescale": 6, "load_k": 4, "load_v": 2}
        }
        # A packed multiply-add is two.
        assert loops["softmax"].operations["fma"] == 2

    def test_one_instruction_more_shows(self) -> None:
        graph = synthetic("\tMUFU.EX2 R7, R7\n", "\tMUFU.EX2 R7, R7\n\tMUFU.EX2 R8, R8\n")
        softmax = main_loops(graph.function)["softmax"]
        assert (softmax.counts["mufu"], softmax.instructions) == (3, 12)

    def test_values_that_are_keys_have_no_loop_of_their_own(self) -> None:
        graph = synthetic("UTMALDG.3D.2CTA [UR8], [UR14]\n\t@P1 BRA `(.L_values)", "NOP")
        assert "load_v" not in main_loops(graph.function)

    def test_products_in_two_loops_are_refused(self) -> None:
        graph = synthetic(
            "\tUTMALDG.3D.2CTA [UR8], [UR14]\n\t@P1 BRA `(.L_values)",
            "\tUTCQMMA gdesc[UR4]\n\t@P1 BRA `(.L_values)",
        )
        with pytest.raises(DisassemblyError, match=r"loop of mma: got 2 loops with .*, need 1"):
            main_loops(graph.function)

    def test_scores_outside_of_a_loop_are_refused(self) -> None:
        graph = synthetic("\tLDTM.x64 R4, tmem[UR14]\n", "")
        with pytest.raises(DisassemblyError, match="main loop of softmax: got 0 loops"):
            main_loops(graph.function)


class TestPipes:
    @pytest.mark.parametrize(
        ("opcode", "pipe"),
        [
            ("UTCQMMA.WS", "tensor"),
            ("MUFU.EX2", "mufu"),
            ("IMAD.MOV.U32", "fma"),
            ("FADD2", "fma"),
            ("FMNMX3", "alu"),
            ("F2FP.BF16.F32.PACK_AB", "convert"),
            ("STS.128", "shared"),
            ("LDTM.STAT.x64.MAX.F32", "tmem"),
            ("UTMALDG.3D", "tma"),
            ("UTCBAR.2CTA.MULTICAST", "barrier"),
            ("USYNCS", "barrier"),
            ("UISETP.NE.U32.AND", "uniform"),
            ("R2UR", "uniform"),
            ("S2R", "other"),
        ],
    )
    def test_of_an_opcode(self, opcode: str, pipe: str) -> None:
        assert pipes.pipe_of(Instruction(0, "", opcode, "")) == pipe

    def test_no_opcode_has_two(self) -> None:
        names = [name for names in pipes.PIPES.values() for name in names]
        assert len(names) == len(set(names))


class TestRealKernel:
    def test_the_loops_do_what_the_tile_needs(self, compiled: Compiled) -> None:
        """Counts that follow from the algorithm, whatever the compiler does around them."""
        entry = next(k.entry for k in compiled.kernels if k.role == "attention")
        loops = main_loops(functions(disassemble(compiled.cubin))[entry])
        softmax = loops["softmax"]
        # 64 scores of a thread: an exponential each and one for the factor; conversions of pairs.
        assert softmax.counts["mufu"] == 65
        assert softmax.counts["convert"] == 32
        assert sum(i.opcode == "FFMA2" for i in softmax.way) == 32
        assert sum(i.opcode == "STS.128" for i in softmax.way) == 4
        # The mask of an unmasked tile is skipped: none of its 64 selections is counted.
        assert sum(i.name == "FSEL" for i in softmax.way) < 8
        assert softmax.longest >= softmax.instructions + 2 * 64
        # 18 products of S and 8 of O; the accumulator in chunks of 32 of its 256 columns.
        assert loops["mma"].counts["tensor"] == 18 + 8
        assert loops["rescale"].counts["tmem"] == 2 * 8
        assert "tmem" not in loops["correction"].counts
        # Pages of 64: a box of 64 keys by 5 blocks of columns; two boxes by 2 blocks.
        assert loops["load_k"].counts["tma"] == 5
        assert loops["load_v"].counts["tma"] == 2 * 2

    def test_the_documentation_states_its_counts_and_clocks(self, compiled: Compiled) -> None:
        """docs/performance.md has a column for this kernel."""
        entry = next(k.entry for k in compiled.kernels if k.role == "attention")
        loops = main_loops(functions(disassemble(compiled.cubin))[entry])
        text = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
        first_cells = {
            cells[1].strip(): cells[2].strip(" *")
            for line in text.splitlines()
            if len(cells := line.split("|")) > 3
        }
        softmax = loops["softmax"]
        assert first_cells["softmax"] == f"{softmax.instructions} ({softmax.longest})"
        assert first_cells["products (one thread)"].startswith(f"{loops['mma'].instructions}, ")
        found = clocks(tile_work(PAIR, loops["mma"]), loops, B200)
        for row, resource in (
            ("tensor cores (17.8 MFLOP)", "tensor"),
            ("shared memory", "shared"),
            ("memory (36864, 73728 bytes)", "memory"),
            ("MUFU", "mufu"),
            ("issue, of each scheduler", "issue"),
        ):
            assert first_cells[row] == str(round(found[resource])), row
