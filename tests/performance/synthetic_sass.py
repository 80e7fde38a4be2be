"""A small attention kernel in the form of nvdisasm's text, for tests of what reads it.

Its tile loops have what real ones have: waits that spin out of line, a block that only masked tiles
run, an item loop around, a rescale that is skipped, and copies for the elected lane alone.
"""

ENTRY = "attention_0"
COMBINE = "combine_1"

_LINES = """
	LDC R1, c[0x0][0x37c]
	BRA.U UP0, `(.L_mma)
.L_item:
	IMAD R2, R2, R3, RZ
.L_softmax:
	SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R77+UR5+0x38980], R4
	@!P0 BRA `(.L_spin)
.L_ready:
	LDTM.x64 R4, tmem[UR14]
	@!P1 BRA `(.L_bulk)
	ISETP.GT.AND P6, PT, R79.reuse, RZ, PT
	FSEL R4, R4, -INF , P6
	FSEL R5, R5, -INF , P6
.L_bulk:
	FMNMX3 R78, R5, R9, R13, !PT
	FFMA2 R6, R6.F32x2.HI_LO, UR16.F32, R78.reuse.F32
	MUFU.EX2 R6, R6
	MUFU.EX2 R7, R7
	F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R53, R7, R6, RZ
	STS.128 [R5+UR5+0x34000], R8
	@P0 BRA `(.L_softmax)
	@P2 BRA `(.L_item)
	EXIT
.L_mma:
	BRA.U UP1, `(.L_correction)
.L_products:
	BRA.U !UP2, `(.L_second)
	UTCQMMA.2CTA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UPT
	UTCQMMA.2CTA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UPT
.L_second:
	BRA.U !UP3, `(.L_next)
	UTCQMMA.2CTA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UP4
.L_next:
	UIADD3 UR7, UPT, UPT, UR7, 0x1, URZ
	BRA.U UP5, `(.L_products)
	EXIT
.L_correction:
	BRA.U UP1, `(.L_loads)
.L_correct:
	LDS R2, [UR5+0x38a10]
	@!P0 BRA `(.L_done)
	LDTM.x32 R4, tmem[UR14]
	FMUL2 R4, R4.F32x2.HI_LO, R2.F32
	STTM.x32 tmem[UR14], R4
.L_done:
	@P1 BRA `(.L_correct)
	LDTM.x32 R4, tmem[UR14]
	EXIT
.L_loads:
	UTMALDG.5D.2CTA [UR8], [UR14]
.L_keys:
	@!P0 BRA `(.L_keys_end)
	UTMALDG.3D.2CTA [UR8], [UR14]
	UTMALDG.3D.2CTA [UR8], [UR14]
.L_keys_end:
	@P1 BRA `(.L_keys)
.L_values:
	UTMALDG.3D.2CTA [UR8], [UR14]
	@P1 BRA `(.L_values)
	EXIT
.L_spin:
	SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R77+UR5+0x38980], R4
	@!P0 BRA `(.L_spin)
	BRA `(.L_ready)
"""

_COMBINE = """
	LDG.E R4, desc[UR10][R4.64]
	FADD R4, R4, R5
	EXIT
"""


def text(lines: str = _LINES) -> str:
    """Both functions as nvdisasm writes them."""
    return _function(COMBINE, _COMBINE) + _function(ENTRY, lines)


def lines() -> str:
    """The attention kernel's instructions and labels, to be changed by a test."""
    return _LINES


def _function(name: str, body: str) -> str:
    rows = [f"//--------------------- .text.{name} ----", f'	.section	.text.{name},"ax"']
    rows += [f"        .type           {name},@function", f"{name}:", f".text.{name}:"]
    address = 0
    for line in body.strip().splitlines():
        stripped = line.strip()
        if stripped.startswith(".L"):
            rows.append(stripped)
            continue
        guard, _, rest = stripped.partition(" ") if stripped.startswith("@") else ("", "", stripped)
        rows.append(f"        /*{address:04x}*/              {guard:>5} {rest} ;")
        address += 16
    return "\n".join(rows) + "\n"
