//! The second pass of reading: statements become instructions whose operands are numbered slots. Registers, constants and
//! special registers alike are [`RegisterSlot`]s.

use std::collections::HashMap;

use super::PtxInterpretError;
use super::arithmetic::wrapped;
use super::instruction::{
    DecodedEntry, DecodedInstruction, InitialValue, LaunchLimits, OperandAddress, PtxOperation, PtxSpecialRegister,
    RegisterSlot, StateSpace,
};
use super::parse::{
    EntryText, InstructionText, LimitDirective, ModuleText, NumberText, OperandText, PtxStatement, SharedVariable,
};
use super::transaction::MOST_BARRIERS;
use super::types::{FloatFormat, PREDICATE, PtxType};

/// Unused bytes before each array of shared memory: what runs over an array's end meets them.
const GAP: u32 = 1024;
/// Bytes of shared memory, gaps included, that addresses of a cluster's peers leave room for.
pub(super) const MOST_SHARED: u32 = 1 << 24;

/// The meaning of a name in a scope: a register and its type, or the address of a shared array.
#[derive(Clone, Copy)]
pub(super) enum Symbol {
    Register(RegisterSlot, PtxType),
    Shared(u32),
}

/// The state of decoding one entry: names in scope, slots and the layout of shared memory.
pub(super) struct Decoder {
    scopes: Vec<HashMap<String, Symbol>>,
    pub(super) slots: Vec<InitialValue>,
    /// The slots of constants, parameters and special registers, each made once.
    filled: HashMap<InitialValue, RegisterSlot>,
    pub(super) parameters: HashMap<String, usize>,
    pub(super) labels: HashMap<String, usize>,
    arrays: Vec<(u32, u32)>,
    end: u32,
    dynamic: Option<u32>,
}

/// Decodes all entries of a module, or returns the first error.
pub(super) fn decode(text: &ModuleText) -> Result<Vec<DecodedEntry>, PtxInterpretError> {
    text.entries.iter().map(|entry| kernel(entry, &text.shared)).collect()
}

fn text_error<T>(line: usize, problem: String) -> Result<T, PtxInterpretError> {
    Err(PtxInterpretError::Text { line, problem })
}

fn limits(written: &[LimitDirective]) -> Result<LaunchLimits, PtxInterpretError> {
    let mut limits = LaunchLimits::default();
    for limit in written {
        // Missing extents are 1.
        let axes = match *limit.numbers.as_slice() {
            [x] => Some([x, 1, 1]),
            [x, y] => Some([x, y, 1]),
            [x, y, z] => Some([x, y, z]),
            _ => None,
        };
        match (limit.name.as_str(), axes) {
            ("reqnctapercluster", Some(axes)) => limits.cluster = Some(axes),
            ("reqntid", Some(axes)) => limits.block = Some(axes),
            ("maxntid", Some([x, y, z])) => {
                limits.most_threads = Some(x.checked_mul(y).and_then(|xy| xy.checked_mul(z)).unwrap_or(u32::MAX));
            }
            ("explicitcluster", None) => limits.explicit_cluster = true,
            // Hints to the assembler change no result: they are read and have no effect.
            ("minnctapersm" | "maxnreg" | "maxclusterrank", Some([_, 1, 1])) | ("pragma", None) => {}
            (name, _) => {
                return text_error(limit.line, format!("directive .{name} with these numbers is not supported"));
            }
        }
    }
    Ok(limits)
}

/// Checks that an entry which relies on its cluster declares it. Without `.explicitcluster` an assembler guards each barrier of the
/// cluster by a flag of the launch, and a launch that leaves the flag out waits for nobody.
fn expect_explicit_cluster(
    limits: &LaunchLimits,
    instructions: &[DecodedInstruction],
) -> Result<(), PtxInterpretError> {
    // A cluster of one CTA needs no launch attribute: its barrier and its addresses are the CTA's own.
    let is_cluster = limits.cluster.is_some_and(|cluster| cluster != [1, 1, 1]);
    let relies = |name: &str| {
        name.starts_with("barrier.cluster") || name.starts_with("mapa") || name.contains("shared::cluster")
    };
    let Some(first) = instructions.iter().find(|instruction| relies(&instruction.name)) else { return Ok(()) };
    if limits.explicit_cluster || !is_cluster {
        return Ok(());
    }
    let problem = "the entry has .reqnctapercluster and no .explicitcluster, expected both: without it a launch that \
                   sets no cluster runs the CTAs apart, and this waits for none of them or touches none"
        .to_string();
    Err(PtxInterpretError::Instruction { line: first.line, name: first.name.clone(), problem })
}

fn kernel(entry: &EntryText, of_module: &[SharedVariable]) -> Result<DecodedEntry, PtxInterpretError> {
    let mut decoder = Decoder {
        scopes: vec![HashMap::new()],
        slots: Vec::new(),
        filled: HashMap::new(),
        parameters: HashMap::new(),
        labels: HashMap::new(),
        arrays: Vec::new(),
        end: 0,
        dynamic: None,
    };
    for (i, (name, ty)) in entry.parameters.iter().enumerate() {
        if !matches!(PtxType::from_name(ty), Some(PtxType::Bits(64) | PtxType::Unsigned(64) | PtxType::Signed(64))) {
            return text_error(entry.line, format!("parameter {name} is .{ty}, expected a pointer of .u64"));
        }
        if decoder.parameters.insert(name.clone(), i).is_some() {
            return text_error(entry.line, format!("{name} is declared twice"));
        }
    }
    // Shared arrays of the module and of the entry share one window of addresses.
    let in_body = entry.body.iter().filter_map(|statement| match statement {
        PtxStatement::Shared(variable) => Some(variable),
        _ => None,
    });
    let (dynamic, fixed): (Vec<_>, Vec<_>) = of_module.iter().chain(in_body).partition(|v| v.elements.is_none());
    // Arrays without an extent share one place, after all others, where the launch lets it grow.
    for variable in fixed.into_iter().chain(dynamic) {
        decoder.place(variable)?;
    }
    // Labels before instructions: a branch may lead forward.
    let mut at = 0;
    for statement in &entry.body {
        match statement {
            PtxStatement::Instruction(_) => at += 1,
            PtxStatement::Label { line, name } if decoder.labels.insert(name.clone(), at).is_some() => {
                return text_error(*line, format!("label {name} is declared twice"));
            }
            _ => {}
        }
    }
    // Registers are declared in the scope that is open at their declaration.
    let mut instructions = Vec::new();
    for statement in &entry.body {
        match statement {
            PtxStatement::Open => decoder.scopes.push(HashMap::new()),
            PtxStatement::Close => {
                decoder.scopes.pop();
            }
            PtxStatement::Registers { line, ty, names } => decoder.declare(*line, ty, names)?,
            PtxStatement::Instruction(written) => instructions.push(decoder.instruction(written)?),
            PtxStatement::Label { .. } | PtxStatement::Shared(_) => {}
        }
    }
    // A thread that runs past the last instruction returns.
    if decoder.labels.values().any(|&label| label == instructions.len())
        || !matches!(instructions.last(), Some(DecodedInstruction { action: PtxOperation::Exit, guard: None, .. }))
    {
        let name = "ret".to_string();
        instructions.push(DecodedInstruction {
            line: entry.line,
            name,
            guard: None,
            sources: Vec::new(),
            action: PtxOperation::Exit,
        });
    }
    let limits = limits(&entry.limits)?;
    let has_barriers =
        instructions.iter().any(|written| matches!(written.action, PtxOperation::InitialiseBarrier { .. }));
    expect_explicit_cluster(&limits, &instructions)?;
    Ok(DecodedEntry {
        name: entry.name.clone(),
        parameters: entry.parameters.iter().map(|(name, _)| name.clone()).collect(),
        limits,
        slots: decoder.slots,
        instructions,
        barriers_of_a_cta: if has_barriers { MOST_BARRIERS } else { 0 },
        arrays: decoder.arrays,
        dynamic: decoder.dynamic,
    })
}

/// An instruction during decoding: the modifiers that are not yet consumed, and its operands.
pub(super) struct InstructionForm<'a> {
    pub(super) written: &'a InstructionText,
    pub(super) modifiers: Vec<&'a str>,
}

pub(super) type DecodeResult<T> = Result<T, PtxInterpretError>;

impl<'a> InstructionForm<'a> {
    pub(super) fn error<T>(&self, problem: String) -> DecodeResult<T> {
        Err(PtxInterpretError::Instruction { line: self.written.line, name: self.written.name.clone(), problem })
    }

    /// Consumes a modifier and returns whether it was there.
    pub(super) fn flag(&mut self, modifier: &str) -> bool {
        let found = self.modifiers.iter().position(|&word| word == modifier);
        found.map(|at| self.modifiers.remove(at)).is_some()
    }

    /// Consumes the first of these modifiers that is there and returns its value.
    pub(super) fn one_of<T: Copy>(&mut self, choices: &[(&str, T)]) -> Option<T> {
        choices.iter().find(|(word, _)| self.flag(word)).map(|&(_, choice)| choice)
    }

    /// Consumes one of these modifiers, one of which must be there, and returns its value.
    pub(super) fn needs<T: Copy>(&mut self, choices: &[(&str, T)]) -> DecodeResult<T> {
        if let Some(choice) = self.one_of(choices) {
            return Ok(choice);
        }
        let words: Vec<String> = choices.iter().map(|(word, _)| format!(".{word}")).collect();
        self.error(format!("expected one of {}", words.join(", ")))
    }

    /// Consumes the type, which is the last modifier.
    pub(super) fn ty(&mut self) -> DecodeResult<PtxType> {
        match self.modifiers.last().and_then(|word| PtxType::from_name(word)) {
            Some(ty) => {
                self.modifiers.pop();
                Ok(ty)
            }
            None => self.error("expected a type as the last modifier".into()),
        }
    }

    /// Consumes the type, which must be one that the instruction has.
    pub(super) fn ty_of(&mut self, has: impl Fn(PtxType) -> bool) -> DecodeResult<PtxType> {
        let ty = self.ty()?;
        if has(ty) { Ok(ty) } else { self.error(format!("type {ty} is not supported")) }
    }

    /// Checks that every modifier has been consumed.
    pub(super) fn done(&self) -> DecodeResult<()> {
        match self.modifiers.first() {
            Some(modifier) => self.error(format!("modifier .{modifier} is not supported here")),
            None => Ok(()),
        }
    }

    pub(super) fn operands<const N: usize>(&self) -> DecodeResult<&'a [OperandText; N]> {
        match self.written.operands.as_slice().try_into() {
            Ok(operands) => Ok(operands),
            Err(_) => self.error(format!("{} operands, expected {N}", self.written.operands.len())),
        }
    }

    /// Returns the operands, of which there must be `least` to `most`.
    pub(super) fn some_operands(&self, least: usize, most: usize) -> DecodeResult<&'a [OperandText]> {
        let operands = self.written.operands.as_slice();
        if (least..=most).contains(&operands.len()) {
            return Ok(operands);
        }
        let expected = if least == most { least.to_string() } else { format!("{least} to {most}") };
        self.error(format!("{} operands, expected {expected}", operands.len()))
    }
}

impl Decoder {
    /// Assigns an array of shared memory its address.
    fn place(&mut self, variable: &SharedVariable) -> Result<(), PtxInterpretError> {
        let SharedVariable { line, name, align, ty, elements } = variable;
        let Some(size) = PtxType::from_name(ty).filter(|ty| *ty != PtxType::Pred).map(|ty| ty.bits() / 8) else {
            return text_error(*line, format!("an array of .{ty} is not supported"));
        };
        let align = align.unwrap_or(size);
        if !align.is_power_of_two() || align > GAP / 2 {
            return text_error(*line, format!("an alignment of {align}, expected a power of two up to {}", GAP / 2));
        }
        // An address that is an odd multiple of the alignment, so that relying on a better one is found.
        let start = (self.end + GAP).next_multiple_of(2 * align) + align;
        let Some(elements) = elements else {
            // All arrays without an extent begin at one address.
            let start = *self.dynamic.get_or_insert(start);
            if !start.is_multiple_of(align) {
                let problem = format!("{name} is aligned to {align}, another array without an extent to less");
                return text_error(*line, problem);
            }
            return self.name(*line, name, Symbol::Shared(start));
        };
        // A text may declare any number of elements, so the sum is checked for overflow.
        let end = elements.checked_mul(size).and_then(|bytes| start.checked_add(bytes));
        let Some(end) = end.filter(|&end| end < MOST_SHARED) else {
            return text_error(*line, format!("{name} does not fit into shared memory"));
        };
        self.end = end;
        self.arrays.push((start, end));
        self.name(*line, name, Symbol::Shared(start))
    }

    fn name(&mut self, line: usize, name: &str, named: Symbol) -> Result<(), PtxInterpretError> {
        match self.scopes.last_mut().expect("a scope is open").insert(name.to_string(), named) {
            Some(_) => text_error(line, format!("{name} is declared twice")),
            None => Ok(()),
        }
    }

    fn declare(&mut self, line: usize, ty: &str, names: &[(String, Option<u32>)]) -> Result<(), PtxInterpretError> {
        let Some(ty) = PtxType::from_name(ty).filter(|ty| ty.bits() != 8) else {
            return text_error(line, format!("registers of .{ty} are not supported"));
        };
        // `%r<4>` declares %r0 to %r3.
        for (name, times) in names {
            let all = match times {
                None => vec![name.clone()],
                Some(times) => (0..*times).map(|i| format!("{name}{i}")).collect(),
            };
            for name in all {
                let slot = self.slots.len();
                self.slots.push(InitialValue::Unwritten);
                self.name(line, &name, Symbol::Register(slot, ty))?;
            }
        }
        Ok(())
    }

    pub(super) fn fill(&mut self, fill: InitialValue) -> RegisterSlot {
        *self.filled.entry(fill).or_insert_with(|| {
            self.slots.push(fill);
            self.slots.len() - 1
        })
    }

    pub(super) fn named(&self, name: &str) -> Option<Symbol> {
        self.scopes.iter().rev().find_map(|scope| scope.get(name)).copied()
    }

    fn register(&self, form: &InstructionForm, name: &str) -> DecodeResult<(RegisterSlot, PtxType)> {
        match self.named(name) {
            Some(Symbol::Register(slot, ty)) => Ok((slot, ty)),
            Some(Symbol::Shared(_)) => form.error(format!("{name} is an array, expected a register")),
            None => form.error(format!("{name} is not declared")),
        }
    }

    /// Returns the register that takes a result of type `ty`.
    pub(super) fn target(
        &self,
        form: &InstructionForm,
        operand: &OperandText,
        ty: PtxType,
    ) -> DecodeResult<RegisterSlot> {
        let OperandText::Name(name) = operand else { return form.error(format!("expected a register of {ty}")) };
        let (slot, of) = self.register(form, name)?;
        if of.serves(ty) { Ok(slot) } else { form.error(format!("{name} is {of}, expected {ty}")) }
    }

    /// Returns a register of integers that is as wide as `ty` or wider, and its width in bits.
    pub(super) fn loose_target(
        &self,
        form: &InstructionForm,
        operand: &OperandText,
        ty: PtxType,
    ) -> DecodeResult<(RegisterSlot, u32)> {
        let OperandText::Name(name) = operand else { return form.error(format!("expected a register of {ty}")) };
        let (slot, of) = self.register(form, name)?;
        if of.serves_loosely(ty) { Ok((slot, of.bits())) } else { form.error(format!("{name} is {of}, expected {ty}")) }
    }

    pub(super) fn source(
        &mut self,
        form: &InstructionForm,
        operand: &OperandText,
        ty: PtxType,
    ) -> DecodeResult<RegisterSlot> {
        self.any_source(form, operand, ty, PtxType::serves)
    }

    pub(super) fn any_source(
        &mut self,
        form: &InstructionForm,
        operand: &OperandText,
        ty: PtxType,
        serves: fn(PtxType, PtxType) -> bool,
    ) -> DecodeResult<RegisterSlot> {
        match operand {
            OperandText::Number(number) => {
                let bits = constant(form, *number, ty)?;
                Ok(self.fill(InitialValue::Value(bits)))
            }
            OperandText::Name(name) => {
                // Special registers first: their names begin with % like those of registers, and cannot be declared.
                if let Some((special, bits)) = special(name) {
                    if !PtxType::Bits(bits).serves(ty) {
                        return form.error(format!("{name} has {bits} bits, expected {ty}"));
                    }
                    return Ok(self.fill(special));
                }
                match self.named(name) {
                    Some(Symbol::Register(slot, of)) if serves(of, ty) => Ok(slot),
                    Some(Symbol::Register(_, of)) => form.error(format!("{name} is {of}, expected {ty}")),
                    // The name of a shared array is its address, a constant of the kernel.
                    Some(Symbol::Shared(address)) if [32, 64].contains(&ty.bits()) && !ty.is_float() => {
                        Ok(self.fill(InitialValue::Value(address.into())))
                    }
                    Some(Symbol::Shared(_)) => form.error(format!("{name} is an address, expected {ty}")),
                    None => form.error(format!("{name} is not declared")),
                }
            }
            _ => form.error(format!("expected a register or a number of {ty}")),
        }
    }

    /// Reads a predicate operand: its slot, and whether it is negated.
    pub(super) fn predicate(
        &mut self,
        form: &InstructionForm,
        operand: &OperandText,
    ) -> DecodeResult<(RegisterSlot, bool)> {
        match operand {
            OperandText::Not(name) => Ok((self.source(form, &OperandText::Name(name.clone()), PREDICATE)?, true)),
            other => Ok((self.source(form, other, PREDICATE)?, false)),
        }
    }

    /// Returns the registers of a target `d` or `d|p`; None for `_` and for a second one that is not there.
    pub(super) fn pair(
        &self,
        form: &InstructionForm,
        operand: &OperandText,
        first: PtxType,
        second: PtxType,
    ) -> DecodeResult<[Option<RegisterSlot>; 2]> {
        let of = |name: &String, ty| match name.as_str() {
            "_" => Ok(None),
            _ => self.target(form, &OperandText::Name(name.clone()), ty).map(Some),
        };
        match operand {
            OperandText::Pair(a, b) => Ok([of(a, first)?, of(b, second)?]),
            OperandText::Name(a) => Ok([of(a, first)?, None]),
            _ => form.error(format!("expected registers of {first} and {second}")),
        }
    }

    pub(super) fn address(
        &mut self,
        form: &InstructionForm,
        operand: &OperandText,
        space: StateSpace,
    ) -> DecodeResult<OperandAddress> {
        let OperandText::Address(base, offset) = operand else {
            return form.error("expected an address in [ ]".into());
        };
        let base = match (&**base, space) {
            (OperandText::Name(name), _) => match self.named(name) {
                Some(Symbol::Register(slot, PtxType::Bits(64) | PtxType::Unsigned(64) | PtxType::Signed(64))) => slot,
                // Shared addresses have 32 bits or 64; a global one needs all 64.
                Some(Symbol::Register(slot, PtxType::Bits(32) | PtxType::Unsigned(32) | PtxType::Signed(32)))
                    if space != StateSpace::Global =>
                {
                    slot
                }
                Some(Symbol::Shared(address)) if space != StateSpace::Global => {
                    self.fill(InitialValue::Value(address.into()))
                }
                Some(Symbol::Register(_, ty)) => return form.error(format!("{name} is {ty}, expected an address")),
                _ => return form.error(format!("{name} is no address of this space")),
            },
            _ => return form.error("an address that is a number is not supported".into()),
        };
        Ok(OperandAddress { base, offset: *offset })
    }
}

/// Converts a number of the text to the bits of a `ty`.
pub(super) fn constant(form: &InstructionForm, number: NumberText, ty: PtxType) -> DecodeResult<u64> {
    let bits = ty.bits();
    match (number, ty) {
        // A whole number fits if either reading of its bits does: −1 and 0xFFFFFFFF are the same constant of 32 bits.
        (NumberText::Whole(x), PtxType::Bits(_) | PtxType::Unsigned(_) | PtxType::Signed(_))
            if -(1_i128 << (bits - 1)) <= x && x < 1_i128 << bits =>
        {
            Ok(wrapped(x, bits))
        }
        (NumberText::Single(x), PtxType::Float(FloatFormat::F32) | PtxType::Bits(32)) => Ok(x.into()),
        (NumberText::Decimal(x), PtxType::Float(FloatFormat::F32)) => Ok((x as f32).to_bits().into()),
        (NumberText::Whole(x @ (0 | 1)), PtxType::Pred) => Ok(wrapped(x, 1)),
        _ => form.error(format!("{number:?} is not a number of {ty}")),
    }
}

/// Looks up a special register by name, and returns its initial value and its width in bits.
fn special(name: &str) -> Option<(InitialValue, u32)> {
    // Registers with three axes have one as a suffix; all others have none.
    let (register, axis) = match name.rsplit_once('.') {
        Some((register, axis)) => (register, ["x", "y", "z"].iter().position(|&word| word == axis)?),
        None => (name, 3),
    };
    let special = match (register, axis) {
        ("WARP_SZ", 3) => return Some((InitialValue::Value(32), 32)),
        ("%tid", 0..3) => PtxSpecialRegister::Tid(axis),
        ("%ntid", 0..3) => PtxSpecialRegister::Ntid(axis),
        ("%ctaid", 0..3) => PtxSpecialRegister::Ctaid(axis),
        ("%nctaid", 0..3) => PtxSpecialRegister::Nctaid(axis),
        ("%cluster_ctaid", 0..3) => PtxSpecialRegister::ClusterCtaid(axis),
        ("%cluster_nctaid", 0..3) => PtxSpecialRegister::ClusterNctaid(axis),
        ("%clusterid", 0..3) => PtxSpecialRegister::ClusterId(axis),
        ("%nclusterid", 0..3) => PtxSpecialRegister::Nclusterid(axis),
        ("%cluster_ctarank", 3) => PtxSpecialRegister::ClusterCtarank,
        ("%cluster_nctarank", 3) => PtxSpecialRegister::ClusterNctarank,
        ("%laneid", 3) => PtxSpecialRegister::Laneid,
        ("%warpid", 3) => PtxSpecialRegister::Warpid,
        ("%nwarpid", 3) => PtxSpecialRegister::Nwarpid,
        ("%lanemask_lt", 3) => PtxSpecialRegister::LanesBelow,
        ("%lanemask_le", 3) => PtxSpecialRegister::LanesUpTo,
        ("%lanemask_ge", 3) => PtxSpecialRegister::LanesFrom,
        ("%lanemask_gt", 3) => PtxSpecialRegister::LanesAbove,
        ("%lanemask_eq", 3) => PtxSpecialRegister::LaneBit,
        _ => return None,
    };
    Some((InitialValue::Special(special), 32))
}
