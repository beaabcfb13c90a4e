//! The execution units that a machine instruction occupies, and for how many clocks.
//!
//! | pipe | what goes through it |
//! |---|---|
//! | `issue` | every instruction: one a clock on each quarter of a multiprocessor |
//! | `fma` | f32 additions and multiplications, products of integers, from `sm_90` on pairs of 16 bits |
//! | `product` | products of integers, which half of `fma` can |
//! | `half` | arithmetic of pairs of 16 bits |
//! | `alu` | integers, logic, shifts, comparisons, minimum and maximum, packing to 16 bits |
//! | `xu` | `MUFU`: exponential, logarithm, reciprocal; conversions of integers |
//! | `lsu` | loads, stores, copies, shuffles, reads of special registers |
//! | `shared` | bytes that instructions read of shared memory and write to it; conflicts of banks, and what copies write, are left out |
//!
//! The pipes are those of Nsight Compute's documentation ("Pipelines"); the rates are [`GpuRates`](super::target::GpuRates). Branches,
//! barriers, waits, constants
//! and the uniform data path count as `issue` alone. So do unknown instructions, which are reported by name.

use super::target::{GpuChip, ISSUED, SHARED_BYTES_A_CLOCK, WARP};

/// The names of the pipes, in the order of the module's table.
pub(crate) const PIPES: [&str; 8] = ["issue", "fma", "product", "half", "alu", "xu", "lsu", "shared"];

/// Returns the clocks that one instruction of a warp occupies each pipe of a multiprocessor. `None` for an unknown instruction, which
/// certainly takes `issue`.
pub(crate) fn taken(chip: &GpuChip, mnemonic: &str) -> Option<Vec<(&'static str, f64)>> {
    let rates = &chip.rates;
    let clocks = |rate: f64| f64::from(WARP) / rate;
    let (opcode, modifiers) = mnemonic.split_once('.').unwrap_or((mnemonic, ""));
    let is = |modifier: &str| modifiers.split('.').any(|one| one == modifier);
    // Every instruction takes an issue slot, and most take one more pipe.
    let mut pipes = vec![("issue", clocks(ISSUED))];
    let integer = clocks(rates.integer);
    match opcode {
        "FFMA" | "FADD" | "FMUL" | "FFMA32I" | "FADD32I" | "FMUL32I" => pipes.push(("fma", clocks(rates.f32))),
        // Two results a thread.
        "FFMA2" | "FADD2" | "FMUL2" => pipes.push(("fma", 2.0 * clocks(rates.f32))),
        // Integer products go through `fma`, of which one half can compute them.
        "IMAD" | "IMUL" | "IMAD32I" | "IDP" | "IDP4A" => {
            pipes.push(("fma", clocks(rates.f32)));
            pipes.push(("product", clocks(rates.integer_product)));
        }
        "HFMA2" | "HADD2" | "HMUL2" | "HFMA2_32I" | "HADD2_32I" | "HMUL2_32I" => {
            let bf16 = is("BF16_V2") || is("BF16");
            pipes.push(("half", clocks(if bf16 { rates.bf16x2 } else { rates.f16x2 })));
            // `.MMA` goes by the tensor cores' way.
            if chip.capability >= (9, 0) && !is("MMA") {
                pipes.push(("fma", clocks(rates.f32)));
            }
        }
        "FMNMX" | "FMNMX3" => pipes.push(("alu", clocks(rates.f32_min_max))),
        "IADD3" | "IADD" | "IADD32I" | "IABS" | "LOP3" | "LOP" | "LOP32I" | "SHF" | "SHL" | "SHR" | "LEA" | "ISETP"
        | "IMNMX" | "VIMNMX" | "VIMNMX3" | "VIADD" | "VIADDMNMX" | "SEL" | "FSEL" | "FSETP" | "FSET" | "FCHK"
        | "PRMT" | "BMSK" | "SGXT" | "PLOP3" | "P2R" | "R2P" | "F2FP" | "I2FP" | "HMNMX2" | "VHMNMX" | "HSETP2"
        | "HSET2" | "FSWZADD" => {
            pipes.push(("alu", integer));
        }
        "MUFU" | "I2F" | "F2I" | "POPC" | "FLO" | "BREV" => pipes.push(("xu", clocks(rates.transcendental))),
        "F2F" | "FRND" | "I2I" => pipes.push(("xu", clocks(rates.conversion))),
        "LDS" | "STS" => {
            pipes.push(("lsu", clocks(rates.memory)));
            let bytes = if is("128") {
                16.0
            } else if is("64") {
                8.0
            } else if is("U8") || is("S8") {
                1.0
            } else if is("U16") || is("S16") {
                2.0
            } else {
                4.0
            };
            pipes.push(("shared", f64::from(WARP) * bytes / SHARED_BYTES_A_CLOCK));
        }
        "LDG" | "STG" | "LD" | "ST" | "LDGSTS" | "LDL" | "STL" | "SHFL" | "S2R" | "ATOM" | "ATOMG" | "ATOMS"
        | "RED" | "REDG" | "LDSM" | "STSM" | "MATCH" => pipes.push(("lsu", clocks(rates.memory))),
        // Moves are one of two kinds, as the assembler likes.
        "MOV" | "MOV32I" | "CS2R" | "LDC" | "LDCU" | "BRA" | "BRX" | "EXIT" | "NOP" | "BAR" | "BSSY" | "BSYNC"
        | "BREAK" | "WARPSYNC" | "DEPBAR" | "LDGDEPBAR" | "LDGSTSBAR" | "YIELD" | "VOTE" | "VOTEU" | "R2UR"
        | "S2UR" | "ERRBAR" | "MEMBAR" | "CCTL" | "CGAERRBAR" | "FENCE" | "ARRIVES" | "ELECT" | "REDUX" | "CALL"
        | "RET" | "BMOV" | "ACQBULK" | "MAPA" | "NANOSLEEP" | "CREDUX" | "SYNCS" => {}
        _ if opcode.starts_with('U') => {}
        _ => return None,
    }
    Some(pipes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::GpuTarget;

    #[test]
    fn pipes_of_instructions_follow_nvidias_documents() {
        let taken = |chip, mnemonic| {
            let pipes = super::taken(GpuTarget::parse(chip).unwrap().chip, mnemonic).unwrap();
            pipes.into_iter().filter(|(name, _)| *name != "issue").collect::<Vec<_>>()
        };
        assert_eq!(taken("h100", "MUFU.EX2"), [("xu", 2.0)]);
        assert_eq!(taken("h100", "FFMA"), [("fma", 0.25)]);
        assert_eq!(taken("a100", "FFMA.FTZ"), [("fma", 0.5)]);
        assert_eq!(taken("b200", "FFMA2"), [("fma", 0.5)]);
        assert_eq!(taken("h100", "HFMA2.BF16_V2"), [("half", 0.25), ("fma", 0.25)]);
        assert_eq!(taken("a100", "HFMA2.BF16_V2"), [("half", 0.5)]);
        assert_eq!(taken("h100", "FMNMX"), [("alu", 0.5)]);
        assert_eq!(taken("b200", "FMNMX"), [("alu", 0.25)]);
        assert_eq!(taken("h100", "LDS.128"), [("lsu", 1.0), ("shared", 4.0)]);
        assert_eq!(taken("h100", "STS.U16"), [("lsu", 1.0), ("shared", 0.5)]);
        assert_eq!(taken("h100", "IMAD.MOV.U32"), [("fma", 0.25), ("product", 0.5)]);
        assert!(taken("h100", "UIADD3").is_empty() && taken("h100", "BRA").is_empty());
        assert_eq!(super::taken(GpuTarget::parse("h100").unwrap().chip, "QGMMA"), None);
    }

    #[test]
    fn pipes_all_have_names() {
        let chip = GpuTarget::parse("h100").unwrap().chip;
        for mnemonic in ["FFMA", "IMAD", "HFMA2", "IADD3", "MUFU", "LDS.64", "SHFL", "EXIT"] {
            for (pipe, clocks) in taken(chip, mnemonic).unwrap() {
                assert!(PIPES.contains(&pipe) && clocks > 0.0, "{mnemonic} {pipe}");
            }
        }
    }
}
