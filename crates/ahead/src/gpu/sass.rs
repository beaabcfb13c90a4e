//! The machine's instructions, as `nvdisasm -gp -c` prints them: each with the line of the PTX that it comes from.

use crate::error::AheadError;

/// An instruction of a kernel's machine code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SassInstruction {
    /// The offset from the start of the kernel, in bytes.
    pub(crate) address: u64,
    /// The opcode with its modifiers, such as `MUFU.EX2`.
    pub(crate) mnemonic: String,
    /// The line of the PTX, from 1; `None` if the assembler gives none.
    pub(crate) line: Option<usize>,
    /// The address that a branch jumps to.
    pub(crate) target: Option<u64>,
}

/// Creates the error of a line of disassembly that does not read as expected.
fn malformed(line: usize, given: &str, expected: &'static str) -> AheadError {
    AheadError::quoted("nvdisasm", line, given, expected)
}

/// Parses the instructions of `kernel` in order, without the padding at its end.
///
/// # Errors
/// [`AheadError::Malformed`] where the text does not read as expected.
pub(crate) fn parse(kernel: &str, text: &str) -> Result<Vec<SassInstruction>, AheadError> {
    let mut instructions: Vec<SassInstruction> = Vec::new();
    // Where labels stand, and which instruction goes to which.
    let mut labels: Vec<(String, u64)> = Vec::new();
    let mut waiting: Vec<String> = Vec::new();
    let mut branches: Vec<(usize, usize, String)> = Vec::new();
    let mut line_of_ptx = None;
    let mut inside = false;
    let section = format!(".text.{kernel}:");
    for (at, line) in text.lines().enumerate() {
        let trimmed = line.trim();
        // The listing has sections; the kernel's code is in `.text.NAME`.
        if trimmed == section {
            inside = true;
            continue;
        }
        if !inside {
            continue;
        }
        if trimmed.starts_with("//---") || trimmed.starts_with(".section") {
            break;
        }
        // A comment before an instruction has the line of PTX, for all instructions up to the next such comment.
        if let Some(place) = trimmed.strip_prefix("//## File \".nv_debug_ptx_txt") {
            let number = place.split_once("line ").map(|(_, rest)| rest.split(|c: char| !c.is_ascii_digit()));
            line_of_ptx = number.and_then(|mut digits| digits.next()).and_then(|digits| digits.parse().ok());
            continue;
        }
        // A label belongs to the next instruction, whose address is not known yet.
        if let Some(label) = trimmed.strip_suffix(':').filter(|label| !label.contains(' ')) {
            waiting.push(label.into());
            continue;
        }
        // `/*0020*/ @!P0 BRA `(.L_x_0) ;`: the address, an optional guard, the mnemonic.
        let Some((address, rest)) = trimmed.strip_prefix("/*").and_then(|rest| rest.split_once("*/")) else { continue };
        let address = u64::from_str_radix(address, 16).map_err(|_| malformed(at + 1, line, "an address"))?;
        let text = rest.split(';').next().unwrap_or_default().trim();
        let text = match text.strip_prefix('@') {
            Some(guarded) => guarded.split_once(' ').map_or("", |(_, text)| text.trim()),
            None => text,
        };
        let mnemonic = text.split_whitespace().next().ok_or_else(|| malformed(at + 1, line, "an instruction"))?;
        labels.extend(waiting.drain(..).map(|label| (label, address)));
        // A function that is called, and the way back from it, make no loop.
        let branch = mnemonic.split('.').next() == Some("BRA");
        if let Some((_, label)) = text.split_once("`(").filter(|_| branch) {
            let label = label.split(')').next().unwrap_or_default();
            branches.push((at + 1, instructions.len(), label.into()));
        }
        instructions.push(SassInstruction { address, mnemonic: mnemonic.into(), line: line_of_ptx, target: None });
    }
    if instructions.is_empty() {
        return Err(malformed(0, text.lines().next().unwrap_or_default(), "a section of the kernel"));
    }
    // Now that all labels have addresses, branches get their targets.
    for (line, at, label) in branches {
        let found = labels.iter().find(|(name, _)| *name == label);
        let (_, address) = found.ok_or_else(|| malformed(line, &label, "a label of the kernel"))?;
        instructions[at].target = Some(*address);
    }
    // The end is a branch to itself, and what fills the last line of the cache.
    let end = instructions.iter().position(|last| last.mnemonic == "BRA" && last.target == Some(last.address));
    instructions.truncate(end.unwrap_or(instructions.len()));
    Ok(instructions)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const TEXT: &str = "\t.section\t.text.scale,\"ax\",@progbits
        .global         scale
scale:
.text.scale:
\t//## File \".nv_debug_ptx_txt\", line 10
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
\t//## File \".nv_debug_ptx_txt\", line 25
        /*0010*/                   MUFU.EX2 R0, R6 ;
\t//## File \".nv_debug_ptx_txt\", line 34
        /*0020*/              @!P0 BRA `(.L_x_0) ;
.L_x_2:
\t//## File \".nv_debug_ptx_txt\", line 35
        /*0030*/                   RET.REL.NODEC R8 `(scale) ;
.L_x_1:
        /*0040*/                   BRA `(.L_x_1);
        /*0050*/                   NOP;
";

    #[test]
    fn sass_instructions_have_lines_and_branches_targets() {
        let read = parse("scale", TEXT).unwrap();
        let of = |address, mnemonic: &str, line, target| SassInstruction {
            address,
            mnemonic: mnemonic.into(),
            line: Some(line),
            target,
        };
        let expected = [
            of(0, "LDC", 10, None),
            of(16, "MUFU.EX2", 25, None),
            of(32, "BRA", 34, Some(16)),
            of(48, "RET.REL.NODEC", 35, None),
        ];
        assert_eq!(read, expected);
    }

    #[test]
    fn sass_of_another_form_is_an_error() {
        for (given, replaced, expected) in [
            (TEXT, "", "a section of the kernel"),
            ("text.scale", "text.other", "a section of the kernel"),
            (".L_x_0:", "", "a label"),
            ("/*0010*/", "/*zz*/", "an address"),
        ] {
            let text = TEXT.replace(given, replaced);
            let error = parse("scale", &text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
