//! Statements into instructions that name places: registers, constants and special registers alike are [`Slot`]s.

use std::collections::HashMap;

use super::InterpretError;
use super::arithmetic::{
    self, Approximate, Comparison, Function, Rounded, Rounding, approximate, compares, conversion, mask, of_elements,
    round_once, whole,
};
use super::parse::{Entry, Instruction as Written, Limit, Number, Operand, Statement, Text, Variable};
use super::types::{Float, Type};

/// A row of a warp's lanes.
pub(super) type Slot = usize;

/// Unused bytes before each array of shared memory: what runs over an array's end meets them.
const GAP: u32 = 1024;
/// Bytes of shared memory, gaps included, that addresses of a cluster's peers leave room for.
pub(super) const MOST_SHARED: u32 = 1 << 24;

/// An entry that can run.
pub(super) struct Kernel {
    pub(super) name: String,
    /// Names of the parameters, each a pointer.
    pub(super) parameters: Vec<String>,
    pub(super) limits: Limits,
    /// What each slot holds from the beginning.
    pub(super) slots: Vec<Fill>,
    pub(super) instructions: Vec<Instruction>,
    /// Where arrays of shared memory lie.
    pub(super) arrays: Vec<(u32, u32)>,
    /// Where the array lies whose extent is the launch's.
    pub(super) dynamic: Option<u32>,
}

/// What directives demand of a launch.
#[derive(Default)]
pub(super) struct Limits {
    pub(super) cluster: Option<[u32; 3]>,
    pub(super) block: Option<[u32; 3]>,
    pub(super) most_threads: Option<u32>,
}

/// What a slot holds from the beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Fill {
    /// A register, which must be written before it is read.
    Unwritten,
    Value(u64),
    Parameter(usize),
    Special(Special),
}

/// A special register; the number is an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Special {
    Tid(usize),
    Ntid(usize),
    Ctaid(usize),
    Nctaid(usize),
    ClusterCtaid(usize),
    ClusterNctaid(usize),
    ClusterId(usize),
    Nclusterid(usize),
    ClusterCtarank,
    ClusterNctarank,
    Laneid,
    Warpid,
    Nwarpid,
    LanesBelow,
    LanesUpTo,
    LanesFrom,
    LanesAbove,
    LaneBit,
}

pub(super) struct Instruction {
    pub(super) line: usize,
    /// With its modifiers.
    pub(super) name: String,
    /// A predicate, and whether the instruction runs where it is false.
    pub(super) guard: Option<(Slot, bool)>,
    /// What a run reads, to see that it was written.
    pub(super) sources: Vec<Slot>,
    pub(super) action: Action,
}

pub(super) enum Action {
    Compute {
        to: Slot,
        of: [Slot; 3],
        function: Function,
    },
    Approximate {
        to: Slot,
        of: [Slot; 2],
        function: Approximate,
        ftz: bool,
    },
    /// A comparison, and the same of the opposite where there is a second predicate.
    Compare {
        to: [Option<Slot>; 2],
        of: [Slot; 3],
        function: Box<dyn Fn(u64, u64, u64) -> [bool; 2] + Send + Sync>,
    },
    /// Parts of `bits`, the lowest first.
    Split {
        to: Vec<Option<Slot>>,
        of: Slot,
        bits: u32,
    },
    Join {
        to: Slot,
        of: Vec<Slot>,
        bits: u32,
    },
    /// An address of a peer's shared memory.
    Map {
        to: Slot,
        address: Slot,
        rank: Slot,
    },
    /// `register_bits` is the width of the registers that take elements of type `ty`.
    Load {
        space: Space,
        from: Address,
        ty: Type,
        to: Vec<Option<Slot>>,
        register_bits: u32,
        read_only: bool,
    },
    Store {
        space: Space,
        to: Address,
        bytes: u32,
        of: Vec<Slot>,
    },
    Atomic {
        space: Space,
        at: Address,
        ty: Type,
        operation: Atomic,
        to: Option<Slot>,
        of: [Slot; 2],
    },
    /// `cp.async` of `bytes`; fewer are read where `read` says so, none where `ignore` holds, and zeros fill the rest.
    Copy {
        to: Address,
        from: Address,
        bytes: u32,
        read: Option<Slot>,
        ignore: Option<Slot>,
    },
    CommitCopies,
    /// All but so many groups.
    WaitCopies(usize),
    /// Everything.
    WaitAllCopies,
    Branch {
        to: usize,
        uniform: bool,
    },
    Exit,
    /// Of a CTA; the arrival alone where it does not wait.
    Barrier {
        id: Slot,
        threads: Option<Slot>,
        aligned: bool,
        waits: bool,
        reduces: Option<Reduces>,
    },
    WarpBarrier {
        members: Slot,
    },
    ClusterArrive {
        release: bool,
        aligned: bool,
    },
    ClusterWait {
        aligned: bool,
    },
    Fence {
        beyond_cta: bool,
    },
    Shuffle {
        mode: Shuffle,
        to: Slot,
        valid: Option<Slot>,
        of: Slot,
        by: Slot,
        clamp: Slot,
        members: Slot,
    },
    Vote {
        mode: Vote,
        to: Slot,
        of: Slot,
        negated: bool,
        members: Slot,
    },
    /// Over the members of a warp.
    Reduce {
        to: Slot,
        of: Slot,
        members: Slot,
        function: Function,
    },
    Elect {
        to: Option<Slot>,
        elected: Slot,
        members: Slot,
    },
    ActiveMask {
        to: Slot,
    },
    Nothing,
}

/// What a barrier makes of the predicates of all who arrive.
pub(super) struct Reduces {
    pub(super) to: Slot,
    pub(super) of: Slot,
    pub(super) negated: bool,
    pub(super) mode: BarrierReduction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BarrierReduction {
    Count,
    All,
    Any,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Space {
    Global,
    /// The CTA's own.
    Shared,
    /// Anyone's in the cluster.
    Cluster,
}

/// A register and what is added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) base: Slot,
    pub(super) offset: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Atomic {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exchange,
    CompareAndSwap,
    Increment,
    Decrement,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

impl Action {
    /// Whether the lanes of a warp take it together.
    pub(super) fn is_collective(&self) -> bool {
        matches!(
            self,
            Action::Barrier { .. }
                | Action::WarpBarrier { .. }
                | Action::ClusterArrive { .. }
                | Action::ClusterWait { .. }
                | Action::Shuffle { .. }
                | Action::Vote { .. }
                | Action::Reduce { .. }
                | Action::Elect { .. }
        )
    }
}

/// What a name stands for.
#[derive(Clone, Copy)]
enum Named {
    Register(Slot, Type),
    Shared(u32),
}

struct Decoder {
    scopes: Vec<HashMap<String, Named>>,
    slots: Vec<Fill>,
    /// Where what is no register lies.
    filled: HashMap<Fill, Slot>,
    parameters: HashMap<String, usize>,
    labels: HashMap<String, usize>,
    arrays: Vec<(u32, u32)>,
    end: u32,
    dynamic: Option<u32>,
}

/// The entries of a module.
pub(super) fn decode(text: &Text) -> Result<Vec<Kernel>, InterpretError> {
    text.entries.iter().map(|entry| kernel(entry, &text.shared)).collect()
}

fn text_error<T>(line: usize, problem: String) -> Result<T, InterpretError> {
    Err(InterpretError::Text { line, problem })
}

fn limits(written: &[Limit]) -> Result<Limits, InterpretError> {
    let mut limits = Limits::default();
    for limit in written {
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
            ("minnctapersm" | "maxnreg" | "maxclusterrank", Some([_, 1, 1])) | ("pragma" | "explicitcluster", None) => {
            }
            (name, _) => {
                return text_error(limit.line, format!("directive .{name} with these numbers is not supported"));
            }
        }
    }
    Ok(limits)
}

fn kernel(entry: &Entry, of_module: &[Variable]) -> Result<Kernel, InterpretError> {
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
        if !matches!(Type::from_name(ty), Some(Type::Bits(64) | Type::Unsigned(64) | Type::Signed(64))) {
            return text_error(entry.line, format!("parameter {name} is .{ty}, expected a pointer of .u64"));
        }
        if decoder.parameters.insert(name.clone(), i).is_some() {
            return text_error(entry.line, format!("{name} is declared twice"));
        }
    }
    let in_body = entry.body.iter().filter_map(|statement| match statement {
        Statement::Shared(variable) => Some(variable),
        _ => None,
    });
    let (dynamic, fixed): (Vec<_>, Vec<_>) = of_module.iter().chain(in_body).partition(|v| v.elements.is_none());
    // All of one name, and the last in memory.
    for variable in fixed.into_iter().chain(dynamic) {
        decoder.place(variable)?;
    }
    let mut at = 0;
    for statement in &entry.body {
        match statement {
            Statement::Label { line, name } => {
                if decoder.labels.insert(name.clone(), at).is_some() {
                    return text_error(*line, format!("label {name} is declared twice"));
                }
            }
            Statement::Instruction(_) => at += 1,
            _ => {}
        }
    }
    let mut instructions = Vec::new();
    for statement in &entry.body {
        match statement {
            Statement::Open => decoder.scopes.push(HashMap::new()),
            Statement::Close => {
                decoder.scopes.pop();
            }
            Statement::Registers { line, ty, names } => decoder.declare(*line, ty, names)?,
            Statement::Instruction(written) => instructions.push(decoder.instruction(written)?),
            Statement::Label { .. } | Statement::Shared(_) => {}
        }
    }
    // What runs off the end returns.
    if decoder.labels.values().any(|&label| label == instructions.len())
        || !matches!(instructions.last(), Some(Instruction { action: Action::Exit, guard: None, .. }))
    {
        let name = "ret".to_string();
        instructions.push(Instruction {
            line: entry.line,
            name,
            guard: None,
            sources: Vec::new(),
            action: Action::Exit,
        });
    }
    Ok(Kernel {
        name: entry.name.clone(),
        parameters: entry.parameters.iter().map(|(name, _)| name.clone()).collect(),
        limits: limits(&entry.limits)?,
        slots: decoder.slots,
        instructions,
        arrays: decoder.arrays,
        dynamic: decoder.dynamic,
    })
}

/// An instruction while it is taken apart: what is left of its modifiers, and its operands.
struct Form<'a> {
    written: &'a Written,
    modifiers: Vec<&'a str>,
}

type Decoded<T> = Result<T, InterpretError>;

impl<'a> Form<'a> {
    fn error<T>(&self, problem: String) -> Decoded<T> {
        Err(InterpretError::Instruction { line: self.written.line, name: self.written.name.clone(), problem })
    }

    /// Whether the modifier is there; it is taken away.
    fn flag(&mut self, modifier: &str) -> bool {
        let found = self.modifiers.iter().position(|&word| word == modifier);
        found.map(|at| self.modifiers.remove(at)).is_some()
    }

    /// The one of these modifiers that is there; it is taken away.
    fn one_of<T: Copy>(&mut self, choices: &[(&str, T)]) -> Option<T> {
        choices.iter().find(|(word, _)| self.flag(word)).map(|&(_, choice)| choice)
    }

    fn needs<T: Copy>(&mut self, choices: &[(&str, T)]) -> Decoded<T> {
        match self.one_of(choices) {
            Some(choice) => Ok(choice),
            None => {
                let words: Vec<String> = choices.iter().map(|(word, _)| format!(".{word}")).collect();
                self.error(format!("expected one of {}", words.join(", ")))
            }
        }
    }

    /// The type, which comes last.
    fn ty(&mut self) -> Decoded<Type> {
        match self.modifiers.last().and_then(|word| Type::from_name(word)) {
            Some(ty) => {
                self.modifiers.pop();
                Ok(ty)
            }
            None => self.error("expected a type as the last modifier".into()),
        }
    }

    /// The type, which must be one that the instruction has.
    fn ty_of(&mut self, has: impl Fn(Type) -> bool) -> Decoded<Type> {
        let ty = self.ty()?;
        if has(ty) { Ok(ty) } else { self.error(format!("type {ty} is not supported")) }
    }

    /// Nothing is left of the modifiers.
    fn done(&self) -> Decoded<()> {
        match self.modifiers.first() {
            Some(modifier) => self.error(format!("modifier .{modifier} is not supported here")),
            None => Ok(()),
        }
    }

    fn operands<const N: usize>(&self) -> Decoded<&'a [Operand; N]> {
        match self.written.operands.as_slice().try_into() {
            Ok(operands) => Ok(operands),
            Err(_) => self.error(format!("{} operands, expected {N}", self.written.operands.len())),
        }
    }

    /// Between `least` and `most` operands.
    fn some_operands(&self, least: usize, most: usize) -> Decoded<&'a [Operand]> {
        let operands = self.written.operands.as_slice();
        if (least..=most).contains(&operands.len()) {
            return Ok(operands);
        }
        self.error(format!("{} operands, expected {least} to {most}", operands.len()))
    }
}

const ROUNDINGS: [(&str, Rounding); 4] =
    [("rn", Rounding::Nearest), ("rz", Rounding::Zero), ("rm", Rounding::Down), ("rp", Rounding::Up)];
const INTEGRAL: [(&str, Rounding); 4] =
    [("rni", Rounding::Nearest), ("rzi", Rounding::Zero), ("rmi", Rounding::Down), ("rpi", Rounding::Up)];
const SCOPES: [(&str, bool); 4] = [("cta", false), ("cluster", true), ("gpu", true), ("sys", true)];

/// Hints that change no result.
const HINTS: [&str; 22] = [
    "weak",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::evict_normal",
    "L2::evict_first",
    "L2::evict_last",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "L2",
    "L1",
    "fractional",
];

const PREDICATE: Type = Type::Pred;
const U32: Type = Type::Unsigned(32);
const B32: Type = Type::Bits(32);

fn is_whole(ty: Type) -> bool {
    ty.is_integer() && ty.bits() > 8
}

fn is_float(ty: Type) -> bool {
    matches!(ty, Type::Float(_) | Type::Two(_))
}

fn is_bits(ty: Type) -> bool {
    matches!(ty, Type::Bits(16 | 32 | 64))
}

fn is_word(ty: Type) -> bool {
    ty.is_integer() && ty.bits() >= 32
}

impl Decoder {
    /// Room for an array of shared memory.
    fn place(&mut self, variable: &Variable) -> Result<(), InterpretError> {
        let Variable { line, name, align, ty, elements } = variable;
        let Some(size) = Type::from_name(ty).filter(|ty| *ty != Type::Pred).map(|ty| ty.bits() / 8) else {
            return text_error(*line, format!("an array of .{ty} is not supported"));
        };
        let align = align.unwrap_or(size);
        if !align.is_power_of_two() || align > GAP / 2 {
            return text_error(*line, format!("an alignment of {align}, expected a power of two up to {}", GAP / 2));
        }
        // Not better aligned than it says.
        let start = (self.end + GAP).next_multiple_of(2 * align) + align;
        match elements {
            Some(elements) => {
                let end = elements.checked_mul(size).and_then(|bytes| start.checked_add(bytes));
                match end.filter(|&end| end < MOST_SHARED) {
                    Some(end) => self.end = end,
                    None => return text_error(*line, format!("{name} does not fit into shared memory")),
                }
                self.arrays.push((start, self.end));
            }
            None => {
                let start = *self.dynamic.get_or_insert(start);
                if start % align != 0 {
                    return text_error(
                        *line,
                        format!("{name} is aligned to {align}, another array without extent less"),
                    );
                }
            }
        }
        let address = self.dynamic.filter(|_| elements.is_none()).unwrap_or(start);
        self.name(*line, name, Named::Shared(address))
    }

    fn name(&mut self, line: usize, name: &str, named: Named) -> Result<(), InterpretError> {
        match self.scopes.last_mut().expect("a scope is open").insert(name.to_string(), named) {
            Some(_) => text_error(line, format!("{name} is declared twice")),
            None => Ok(()),
        }
    }

    fn declare(&mut self, line: usize, ty: &str, names: &[(String, Option<u32>)]) -> Result<(), InterpretError> {
        let Some(ty) = Type::from_name(ty).filter(|ty| ty.bits() != 8) else {
            return text_error(line, format!("registers of .{ty} are not supported"));
        };
        for (name, times) in names {
            let all = match times {
                None => vec![name.clone()],
                Some(times) => (0..*times).map(|i| format!("{name}{i}")).collect(),
            };
            for name in all {
                let slot = self.slots.len();
                self.slots.push(Fill::Unwritten);
                self.name(line, &name, Named::Register(slot, ty))?;
            }
        }
        Ok(())
    }

    fn fill(&mut self, fill: Fill) -> Slot {
        *self.filled.entry(fill).or_insert_with(|| {
            self.slots.push(fill);
            self.slots.len() - 1
        })
    }

    fn named(&self, name: &str) -> Option<Named> {
        self.scopes.iter().rev().find_map(|scope| scope.get(name)).copied()
    }

    fn register(&self, form: &Form, name: &str) -> Decoded<(Slot, Type)> {
        match self.named(name) {
            Some(Named::Register(slot, ty)) => Ok((slot, ty)),
            Some(Named::Shared(_)) => form.error(format!("{name} is an array, expected a register")),
            None => form.error(format!("{name} is not declared")),
        }
    }

    /// A register that takes a `ty`.
    fn target(&self, form: &Form, operand: &Operand, ty: Type) -> Decoded<Slot> {
        let Operand::Name(name) = operand else { return form.error(format!("expected a register of {ty}")) };
        let (slot, of) = self.register(form, name)?;
        if of.serves(ty) { Ok(slot) } else { form.error(format!("{name} is {of}, expected {ty}")) }
    }

    /// As [`target`](Self::target), or wider, with its width.
    fn loose_target(&self, form: &Form, operand: &Operand, ty: Type) -> Decoded<(Slot, u32)> {
        let Operand::Name(name) = operand else { return form.error(format!("expected a register of {ty}")) };
        let (slot, of) = self.register(form, name)?;
        if of.serves_loosely(ty) { Ok((slot, of.bits())) } else { form.error(format!("{name} is {of}, expected {ty}")) }
    }

    fn source(&mut self, form: &Form, operand: &Operand, ty: Type) -> Decoded<Slot> {
        self.any_source(form, operand, ty, Type::serves)
    }

    fn any_source(
        &mut self,
        form: &Form,
        operand: &Operand,
        ty: Type,
        serves: fn(Type, Type) -> bool,
    ) -> Decoded<Slot> {
        match operand {
            Operand::Number(number) => {
                let bits = constant(form, *number, ty)?;
                Ok(self.fill(Fill::Value(bits)))
            }
            Operand::Name(name) => {
                if let Some((special, bits)) = special(name) {
                    if !Type::Bits(bits).serves(ty) {
                        return form.error(format!("{name} has {bits} bits, expected {ty}"));
                    }
                    return Ok(self.fill(special));
                }
                match self.named(name) {
                    Some(Named::Register(slot, of)) if serves(of, ty) => Ok(slot),
                    Some(Named::Register(_, of)) => form.error(format!("{name} is {of}, expected {ty}")),
                    Some(Named::Shared(address)) if [32, 64].contains(&ty.bits()) && !is_float(ty) => {
                        Ok(self.fill(Fill::Value(address.into())))
                    }
                    Some(Named::Shared(_)) => form.error(format!("{name} is an address, expected {ty}")),
                    None => form.error(format!("{name} is not declared")),
                }
            }
            _ => form.error(format!("expected a register or a number of {ty}")),
        }
    }

    /// A predicate, and whether it is negated.
    fn predicate(&mut self, form: &Form, operand: &Operand) -> Decoded<(Slot, bool)> {
        match operand {
            Operand::Not(name) => Ok((self.source(form, &Operand::Name(name.clone()), PREDICATE)?, true)),
            other => Ok((self.source(form, other, PREDICATE)?, false)),
        }
    }

    /// Where `d` or `d|p` goes; either may be `_`.
    fn pair(&self, form: &Form, operand: &Operand, first: Type, second: Type) -> Decoded<[Option<Slot>; 2]> {
        let of = |name: &String, ty| match name.as_str() {
            "_" => Ok(None),
            _ => self.target(form, &Operand::Name(name.clone()), ty).map(Some),
        };
        match operand {
            Operand::Pair(a, b) => Ok([of(a, first)?, of(b, second)?]),
            Operand::Name(a) => Ok([of(a, first)?, None]),
            _ => form.error(format!("expected registers of {first} and {second}")),
        }
    }

    fn address(&mut self, form: &Form, operand: &Operand, space: Space) -> Decoded<Address> {
        let Operand::Address(base, offset) = operand else { return form.error("expected an address in [ ]".into()) };
        let base = match (&**base, space) {
            (Operand::Name(name), _) => match self.named(name) {
                Some(Named::Register(slot, Type::Bits(64) | Type::Unsigned(64) | Type::Signed(64))) => slot,
                Some(Named::Register(slot, Type::Bits(32) | Type::Unsigned(32) | Type::Signed(32)))
                    if space != Space::Global =>
                {
                    slot
                }
                Some(Named::Shared(address)) if space != Space::Global => self.fill(Fill::Value(address.into())),
                Some(Named::Register(_, ty)) => return form.error(format!("{name} is {ty}, expected an address")),
                _ => return form.error(format!("{name} is no address of this space")),
            },
            _ => return form.error("an address that is a number is not supported".into()),
        };
        Ok(Address { base, offset: *offset })
    }

    fn instruction(&mut self, written: &Written) -> Decoded<Instruction> {
        let mut words = written.name.split('.');
        let opcode = words.next().unwrap_or_default();
        let mut form = Form { written, modifiers: words.collect() };
        let guard = match &written.guard {
            None => None,
            Some((negated, name)) => Some((self.source(&form, &Operand::Name(name.clone()), PREDICATE)?, *negated)),
        };
        let action = self.action(opcode, &mut form)?;
        form.done()?;
        let mut sources = action.sources();
        sources.retain(|&slot| self.slots[slot] == Fill::Unwritten);
        Ok(Instruction { line: written.line, name: written.name.clone(), guard, sources, action })
    }

    fn action(&mut self, opcode: &str, form: &mut Form) -> Decoded<Action> {
        match opcode {
            "add" | "sub" | "mul" | "mad" | "fma" | "div" | "rem" | "min" | "max" | "neg" | "abs" | "copysign" => {
                let ty = form.ty()?;
                if is_float(ty) { self.float(opcode, ty, form) } else { self.integer(opcode, ty, form) }
            }
            "ex2" | "lg2" | "rcp" | "sqrt" | "rsqrt" | "tanh" => self.function(opcode, form),
            "and" | "or" | "xor" | "not" | "shl" | "shr" | "shf" | "bfe" | "bfi" | "prmt" | "lop3" | "popc" | "clz"
            | "brev" => self.bitwise(opcode, form),
            "mov" => self.mov(form),
            "cvt" => self.cvt(form),
            "cvta" => self.cvta(form),
            "mapa" => {
                if !form.flag("shared::cluster") {
                    return form.error("expected .shared::cluster".into());
                }
                let ty = form.ty_of(|ty| ty == U32)?;
                let [to, address, rank] = form.operands()?;
                let (to, address) = (self.target(form, to, ty)?, self.source(form, address, ty)?);
                Ok(Action::Map { to, address, rank: self.source(form, rank, U32)? })
            }
            "setp" => self.setp(form),
            "testp" => self.testp(form),
            "selp" => {
                let ty = form.ty_of(|ty| is_bits(ty) || is_whole(ty) || matches!(ty, Type::Float(Float::F32)))?;
                let [to, a, b, p] = form.operands()?;
                let of = [self.source(form, a, ty)?, self.source(form, b, ty)?, self.source(form, p, PREDICATE)?];
                let function = Box::new(|a, b, p| if p == 1 { a } else { b });
                Ok(Action::Compute { to: self.target(form, to, ty)?, of, function })
            }
            "ld" => self.load(form),
            "st" => self.store(form),
            "atom" | "red" => self.atomic(opcode, form),
            "cp" => self.copy(form),
            "prefetch" => {
                let space = form.needs(&[("global", Space::Global)])?;
                strip_hints(form);
                let [at] = form.operands()?;
                self.address(form, at, space)?;
                Ok(Action::Nothing)
            }
            "createpolicy" => {
                strip_hints(form);
                let ty = form.ty_of(|ty| ty == Type::Bits(64))?;
                let to = form.some_operands(1, 2)?;
                let to = self.target(form, &to[0], ty)?;
                Ok(self.constant_into(to, 0))
            }
            "bra" => {
                let uniform = form.flag("uni");
                match form.operands()? {
                    [Operand::Name(label)] => match self.labels.get(label) {
                        Some(&to) => Ok(Action::Branch { to, uniform }),
                        None => form.error(format!("there is no label {label}")),
                    },
                    _ => form.error("expected a label".into()),
                }
            }
            "exit" | "ret" => {
                form.flag("uni");
                form.operands::<0>()?;
                Ok(Action::Exit)
            }
            "bar" | "barrier" => self.barrier(opcode, form),
            "fence" | "membar" => self.fence(opcode, form),
            "shfl" => self.shuffle(form),
            "vote" => self.vote(form),
            "redux" => self.redux(form),
            "elect" => {
                form.needs(&[("sync", ())])?;
                let [to, members] = form.operands()?;
                match self.pair(form, to, B32, PREDICATE)? {
                    [to, Some(elected)] => Ok(Action::Elect { to, elected, members: self.source(form, members, B32)? }),
                    [_, None] => form.error("expected a predicate after |".into()),
                }
            }
            "activemask" => {
                let ty = form.ty_of(|ty| ty == B32)?;
                let [to] = form.operands()?;
                Ok(Action::ActiveMask { to: self.target(form, to, ty)? })
            }
            _ => form.error("the instruction is not known".into()),
        }
    }

    fn constant_into(&mut self, to: Slot, value: u64) -> Action {
        let of = [self.fill(Fill::Value(value)); 3];
        Action::Compute { to, of, function: Box::new(|x, _, _| x) }
    }

    /// `to` and up to three sources of one type.
    fn compute<const N: usize>(&mut self, form: &Form, ty: Type, function: Function) -> Decoded<Action> {
        let operands = form.some_operands(N, N)?;
        let to = self.target(form, &operands[0], ty)?;
        let mut of = [self.fill(Fill::Value(0)); 3];
        for (of, operand) in of.iter_mut().zip(&operands[1..]) {
            *of = self.source(form, operand, ty)?;
        }
        Ok(Action::Compute { to, of, function })
    }

    fn float(&mut self, opcode: &str, ty: Type, form: &mut Form) -> Decoded<Action> {
        let ftz = form.flag("ftz");
        let of_bf16 = matches!(ty, Type::Float(Float::Bf16) | Type::Two(Float::Bf16));
        if ftz && of_bf16 {
            return form.error("modifier .ftz is not supported here".into());
        }
        match opcode {
            "add" | "sub" | "mul" | "fma" => {
                let nearest = form.flag("rn");
                let saturate = ty == Type::Float(Float::F32) && form.flag("sat");
                let operation = match opcode {
                    "add" => Rounded::Add,
                    "sub" => Rounded::Sub,
                    "mul" => Rounded::Mul,
                    _ if nearest => Rounded::Fma,
                    _ => return form.error("expected .rn".into()),
                };
                let function = of_elements(ty, move |float, a, b, c| {
                    let result = round_once(float, operation, ftz, a, b, c);
                    if saturate { arithmetic::saturated(float, result) } else { result }
                });
                if opcode == "fma" {
                    self.compute::<4>(form, ty, function)
                } else {
                    self.compute::<3>(form, ty, function)
                }
            }
            "min" | "max" if ty != Type::Two(Float::F32) => {
                let nan = form.flag("NaN");
                let extreme = if opcode == "min" { arithmetic::smaller } else { arithmetic::larger };
                self.compute::<3>(form, ty, of_elements(ty, move |float, a, b, _| extreme(float, ftz, nan, a, b)))
            }
            "neg" | "abs" if ty != Type::Two(Float::F32) => {
                let absolute = opcode == "abs";
                let function = move |float, x, _, _| arithmetic::signs(float, ftz, absolute, x);
                self.compute::<2>(form, ty, of_elements(ty, function))
            }
            "copysign" if ty == Type::Float(Float::F32) && !ftz => {
                let sign = 1 << 31;
                self.compute::<3>(form, ty, Box::new(move |a, b, _| a & sign | b & !sign))
            }
            "div" if ty == Type::Float(Float::F32) => {
                let function = form.one_of(&[("approx", Approximate::Div), ("full", Approximate::DivFull)]);
                let [to, a, b] = form.operands()?;
                let (to, of) = (self.target(form, to, ty)?, [self.source(form, a, ty)?, self.source(form, b, ty)?]);
                match function {
                    Some(function) => Ok(Action::Approximate { to, of, function, ftz }),
                    None if form.flag("rn") => {
                        let function = of_elements(ty, move |float, a, b, _| arithmetic::quotient(float, ftz, a, b));
                        Ok(Action::Compute { to, of: [of[0], of[1], of[1]], function })
                    }
                    None => form.error("expected .approx, .full or .rn".into()),
                }
            }
            _ => form.error(format!("type {ty} is not supported")),
        }
    }

    fn integer(&mut self, opcode: &str, ty: Type, form: &mut Form) -> Decoded<Action> {
        let bits = ty.bits();
        if !is_whole(ty) {
            return form.error(format!("type {ty} is not supported"));
        }
        let cut = move |x: i128| x as u64 & mask(bits);
        let of = move |x| whole(ty, x);
        match opcode {
            "add" => self.compute::<3>(form, ty, Box::new(move |a, b, _| a.wrapping_add(b) & mask(bits))),
            "sub" => self.compute::<3>(form, ty, Box::new(move |a, b, _| a.wrapping_sub(b) & mask(bits))),
            "min" => self.compute::<3>(form, ty, Box::new(move |a, b, _| cut(of(a).min(of(b))))),
            "max" => self.compute::<3>(form, ty, Box::new(move |a, b, _| cut(of(a).max(of(b))))),
            "neg" if ty.is_signed() => self.compute::<2>(form, ty, Box::new(move |a, _, _| cut(-of(a)))),
            "abs" if ty.is_signed() => self.compute::<2>(form, ty, Box::new(move |a, _, _| cut(of(a).abs()))),
            // By 0: all bits set, and the dividend as the remainder.
            "div" => self.compute::<3>(form, ty, Box::new(move |a, b, _| cut(of(a).checked_div(of(b)).unwrap_or(-1)))),
            "rem" => {
                self.compute::<3>(form, ty, Box::new(move |a, b, _| cut(of(a).checked_rem(of(b)).unwrap_or(of(a)))))
            }
            "mul" | "mad" => {
                let part = form.needs(&[("lo", 0), ("hi", 1), ("wide", 2)])?;
                if part == 2 && bits == 64 {
                    return form.error(format!("type {ty} is not supported"));
                }
                let wide = match ty {
                    Type::Signed(bits) => Type::Signed(2 * bits),
                    _ => Type::Unsigned(2 * bits),
                };
                let (sum, out) = if part == 2 { (wide, 2 * bits) } else { (ty, bits) };
                let function: Function = Box::new(move |a, b, c| {
                    let product = of(a).wrapping_mul(of(b));
                    let product = if part == 1 { product >> bits } else { product };
                    product.wrapping_add(c.into()) as u64 & mask(out)
                });
                let operands = form.some_operands(3, 4)?;
                let of = [self.source(form, &operands[1], ty)?, self.source(form, &operands[2], ty)?];
                let c = match (opcode, operands) {
                    ("mul", [_, _, _]) => self.fill(Fill::Value(0)),
                    ("mad", [_, _, _, c]) => self.source(form, c, sum)?,
                    _ => return form.error(format!("{} operands are not right", operands.len())),
                };
                let to = self.target(form, &operands[0], sum)?;
                Ok(Action::Compute { to, of: [of[0], of[1], c], function })
            }
            _ => form.error(format!("type {ty} is not supported")),
        }
    }

    fn function(&mut self, opcode: &str, form: &mut Form) -> Decoded<Action> {
        let ty = form.ty_of(|ty| ty == Type::Float(Float::F32))?;
        let (approximately, nearest) = (form.flag("approx"), form.flag("rn"));
        let ftz = form.flag("ftz");
        let [to, a] = form.operands()?;
        let (to, a) = (self.target(form, to, ty)?, self.source(form, a, ty)?);
        let function = match opcode {
            "ex2" => Approximate::Ex2,
            "lg2" => Approximate::Lg2,
            "rcp" => Approximate::Rcp,
            "sqrt" => Approximate::Sqrt,
            "rsqrt" => Approximate::Rsqrt,
            _ if ftz => return form.error("modifier .ftz is not supported here".into()),
            _ => Approximate::Tanh,
        };
        match (function, approximately, nearest) {
            (_, true, false) => Ok(Action::Approximate { to, of: [a, a], function, ftz }),
            // f64 has more than twice the bits: what is rounded from it is rounded once.
            (Approximate::Rcp | Approximate::Sqrt, false, true) => {
                let function = Box::new(move |a, _, _| approximate(function, super::Units::Rounded, ftz, a, 0));
                Ok(Action::Compute { to, of: [a; 3], function })
            }
            _ => form.error("expected .approx, or .rn of rcp and sqrt".into()),
        }
    }

    fn bitwise(&mut self, opcode: &str, form: &mut Form) -> Decoded<Action> {
        match opcode {
            "and" | "or" | "xor" => {
                let ty = form.ty_of(|ty| is_bits(ty) || ty == PREDICATE)?;
                let function: Function = match opcode {
                    "and" => Box::new(|a, b, _| a & b),
                    "or" => Box::new(|a, b, _| a | b),
                    _ => Box::new(|a, b, _| a ^ b),
                };
                self.compute::<3>(form, ty, function)
            }
            "not" => {
                let ty = form.ty_of(|ty| is_bits(ty) || ty == PREDICATE)?;
                self.compute::<2>(form, ty, Box::new(move |a, _, _| !a & mask(ty.bits())))
            }
            "shl" | "shr" => {
                let left = opcode == "shl";
                let ty = form.ty_of(|ty| is_bits(ty) || !left && is_whole(ty))?;
                let [to, a, by] = form.operands()?;
                let (to, a, by) = (self.target(form, to, ty)?, self.source(form, a, ty)?, self.source(form, by, U32)?);
                let function = Box::new(move |a, by, _| arithmetic::shifted(ty, left, a, by));
                Ok(Action::Compute { to, of: [a, by, by], function })
            }
            "shf" => {
                let left = form.needs(&[("l", true), ("r", false)])?;
                let wraps = form.needs(&[("wrap", true), ("clamp", false)])?;
                let ty = form.ty_of(|ty| ty == B32)?;
                let function = move |a: u64, b: u64, c: u64| {
                    let by = if wraps { c & 31 } else { c.min(32) };
                    let both = a | b << 32;
                    if left { both << by >> 32 } else { both >> by & mask(32) }
                };
                self.compute::<4>(form, ty, Box::new(function))
            }
            "bfe" => {
                let ty = form.ty_of(is_word)?;
                let [to, a, start, length] = form.operands()?;
                let of = [self.source(form, a, ty)?, self.source(form, start, U32)?, self.source(form, length, U32)?];
                let function = Box::new(move |a, start, length| arithmetic::extracted(ty, a, start, length));
                Ok(Action::Compute { to: self.target(form, to, ty)?, of, function })
            }
            "bfi" => {
                let ty = form.ty_of(|ty| matches!(ty, Type::Bits(32 | 64)))?;
                let [to, a, b, Operand::Number(start), Operand::Number(length)] = form.operands()? else {
                    return form.error("a place that is not a number is not supported".into());
                };
                let (start, length) = (constant(form, *start, U32)?, constant(form, *length, U32)?);
                let of = [self.source(form, a, ty)?, self.source(form, b, ty)?];
                let function = Box::new(move |a, b, _| arithmetic::inserted(ty.bits(), a, b, start, length));
                Ok(Action::Compute { to: self.target(form, to, ty)?, of: [of[0], of[1], of[1]], function })
            }
            "prmt" => {
                let ty = form.ty_of(|ty| ty == B32)?;
                self.compute::<4>(form, ty, Box::new(arithmetic::permuted))
            }
            "lop3" => {
                let ty = form.ty_of(|ty| ty == B32)?;
                let [to, a, b, c, Operand::Number(table)] = form.operands()? else {
                    return form.error("expected a table as the last operand".into());
                };
                let table = constant(form, *table, U32)?;
                let of = [self.source(form, a, ty)?, self.source(form, b, ty)?, self.source(form, c, ty)?];
                let function = Box::new(move |a, b, c| arithmetic::looked_up(table, a, b, c));
                Ok(Action::Compute { to: self.target(form, to, ty)?, of, function })
            }
            _ => {
                let ty = form.ty_of(|ty| matches!(ty, Type::Bits(32 | 64)))?;
                let bits = ty.bits();
                let function: Function = match opcode {
                    "popc" => Box::new(|a: u64, _, _| a.count_ones().into()),
                    "clz" => Box::new(move |a: u64, _, _| u64::from(a.leading_zeros() - (64 - bits))),
                    _ => Box::new(move |a: u64, _, _| a.reverse_bits() >> (64 - bits)),
                };
                let [to, a] = form.operands()?;
                let to = self.target(form, to, if opcode == "brev" { ty } else { U32 })?;
                Ok(Action::Compute { to, of: [self.source(form, a, ty)?; 3], function })
            }
        }
    }

    fn mov(&mut self, form: &mut Form) -> Decoded<Action> {
        let ty = form.ty_of(|ty| ty.bits() != 8)?;
        match form.operands()? {
            [Operand::Vector(parts), of] => {
                let part = part_of(form, ty, parts.len())?;
                let to = parts.iter().map(|operand| match operand {
                    Operand::Name(name) if name == "_" => Ok(None),
                    operand => self.target(form, operand, part).map(Some),
                });
                let to = to.collect::<Decoded<_>>()?;
                Ok(Action::Split { to, of: self.source(form, of, ty)?, bits: part.bits() })
            }
            [to, Operand::Vector(parts)] => {
                let part = part_of(form, ty, parts.len())?;
                let of = parts.iter().map(|operand| self.source(form, operand, part)).collect::<Decoded<_>>()?;
                Ok(Action::Join { to: self.target(form, to, ty)?, of, bits: part.bits() })
            }
            _ => self.compute::<2>(form, ty, Box::new(|x, _, _| x)),
        }
    }

    fn cvt(&mut self, form: &mut Form) -> Decoded<Action> {
        let from = form.ty()?;
        let to = form.ty()?;
        let integral = form.one_of(&INTEGRAL);
        let rounding = integral.or_else(|| form.one_of(&ROUNDINGS));
        let (ftz, saturate) = (form.flag("ftz"), form.flag("sat"));
        if let (Type::Two(float), Some(rounding), false) = (to, rounding, integral.is_some() || ftz || saturate)
            && from == Type::Float(Float::F32)
            && float != Float::F32
            && matches!(rounding, Rounding::Nearest | Rounding::Zero)
        {
            let [d, upper, lower] = form.operands()?;
            let of = [self.source(form, upper, from)?, self.source(form, lower, from)?];
            let function = Box::new(move |upper, lower, _| {
                let part = |x| arithmetic::rounded(float, arithmetic::value(Float::F32, x), rounding);
                part(upper) << 16 | part(lower)
            });
            return Ok(Action::Compute { to: self.target(form, d, to)?, of: [of[0], of[1], of[1]], function });
        }
        let Some(function) = conversion(to, from, rounding, integral.is_some(), ftz, saturate) else {
            return form.error("there is no such conversion, or it is not supported".into());
        };
        let [d, a] = form.operands()?;
        let (d, bits) = self.loose_target(form, d, to)?;
        let a = self.any_source(form, a, from, Type::serves_loosely)?;
        let function = Box::new(move |x, _, _| arithmetic::widened(to, function(x, 0, 0), bits));
        Ok(Action::Compute { to: d, of: [a; 3], function })
    }

    /// Between generic and global addresses, which are the same; those of shared memory are not supported.
    fn cvta(&mut self, form: &mut Form) -> Decoded<Action> {
        form.flag("to");
        form.needs(&[("global", ())])?;
        let ty = form.ty_of(|ty| ty == Type::Unsigned(64))?;
        self.compute::<2>(form, ty, Box::new(|x, _, _| x))
    }

    fn setp(&mut self, form: &mut Form) -> Decoded<Action> {
        use Comparison::{Equal, Greater, GreaterOrEqual, Less, LessOrEqual, NotEqual, Ordered, Unordered};
        let ty = form.ty_of(|ty| is_bits(ty) || is_whole(ty) || matches!(ty, Type::Float(_)))?;
        let ftz = matches!(ty, Type::Float(Float::F32 | Float::F16)) && form.flag("ftz");
        let of_bits = [("eq", (Equal, false)), ("ne", (NotEqual, false))];
        let signed = [
            ("lt", (Less, false)),
            ("le", (LessOrEqual, false)),
            ("gt", (Greater, false)),
            ("ge", (GreaterOrEqual, false)),
        ];
        let unsigned = [
            ("lo", (Less, false)),
            ("ls", (LessOrEqual, false)),
            ("hi", (Greater, false)),
            ("hs", (GreaterOrEqual, false)),
        ];
        let floats = [
            ("equ", (Equal, true)),
            ("neu", (NotEqual, true)),
            ("ltu", (Less, true)),
            ("leu", (LessOrEqual, true)),
            ("gtu", (Greater, true)),
            ("geu", (GreaterOrEqual, true)),
            ("num", (Ordered, false)),
            ("nan", (Unordered, false)),
        ];
        let mut choices = of_bits.to_vec();
        if !is_bits(ty) {
            choices.extend(signed);
        }
        match ty {
            Type::Unsigned(_) => choices.extend(unsigned),
            Type::Float(_) => choices.extend(floats),
            _ => {}
        }
        let (comparison, unordered) = form.needs(&choices)?;
        let combine = form.one_of(&[("and", 0), ("or", 1), ("xor", 2)]);
        let operands = form.some_operands(3, 4)?;
        let to = self.pair(form, &operands[0], PREDICATE, PREDICATE)?;
        let of = [self.source(form, &operands[1], ty)?, self.source(form, &operands[2], ty)?];
        let (with, negated) = match (combine, operands) {
            (None, [_, _, _]) => (self.fill(Fill::Value(0)), false),
            (Some(_), [_, _, _, with]) => self.predicate(form, with)?,
            _ => return form.error(format!("{} operands are not right", operands.len())),
        };
        let function = Box::new(move |a, b, with| {
            let holds = compares(ty, comparison, unordered, ftz, a, b);
            let with = (with == 1) != negated;
            [holds, !holds].map(|holds| match combine {
                None => holds,
                Some(0) => holds & with,
                Some(1) => holds | with,
                Some(_) => holds ^ with,
            })
        });
        Ok(Action::Compare { to, of: [of[0], of[1], with], function })
    }

    fn testp(&mut self, form: &mut Form) -> Decoded<Action> {
        let ty = form.ty_of(|ty| ty == Type::Float(Float::F32))?;
        let test: fn(f32) -> bool = form.needs(&[
            ("finite", f32::is_finite as fn(f32) -> bool),
            ("infinite", f32::is_infinite),
            ("number", |x| !x.is_nan()),
            ("notanumber", f32::is_nan),
            ("normal", f32::is_normal),
            ("subnormal", f32::is_subnormal),
        ])?;
        let [to, a] = form.operands()?;
        let function = Box::new(move |x, _, _| u64::from(test(f32::from_bits(x as u32))));
        Ok(Action::Compute { to: self.target(form, to, PREDICATE)?, of: [self.source(form, a, ty)?; 3], function })
    }

    fn load(&mut self, form: &mut Form) -> Decoded<Action> {
        let ty = form.ty_of(|ty| ty != PREDICATE)?;
        if form.flag("param") {
            return self.load_parameter(form, ty);
        }
        let space = form.needs(&[
            ("global", Space::Global),
            ("shared", Space::Shared),
            ("shared::cta", Space::Shared),
            ("shared::cluster", Space::Cluster),
        ])?;
        let read_only = space == Space::Global && form.flag("nc");
        let width = form.one_of(&[("v2", 2), ("v4", 4)]);
        let operands = self.without_policy(form, 2)?;
        let from = self.address(form, &operands[1], space)?;
        let parts = vector(form, &operands[0], width, ty)?;
        let mut register_bits = ty.bits();
        let mut to = Vec::new();
        for operand in parts {
            if matches!(operand, Operand::Name(name) if name == "_") {
                to.push(None);
                continue;
            }
            let (slot, bits) = self.loose_target(form, operand, ty)?;
            register_bits = bits;
            to.push(Some(slot));
        }
        Ok(Action::Load { space, from, ty, to, register_bits, read_only })
    }

    fn load_parameter(&mut self, form: &mut Form, ty: Type) -> Decoded<Action> {
        let [to, Operand::Address(base, 0)] = form.operands()? else {
            return form.error("expected a parameter in [ ]".into());
        };
        let parameter = match &**base {
            Operand::Name(name) => self.parameters.get(name),
            _ => None,
        };
        match parameter {
            Some(&parameter) if ty.bits() == 64 && !is_float(ty) => {
                let of = [self.fill(Fill::Parameter(parameter)); 3];
                Ok(Action::Compute { to: self.target(form, to, ty)?, of, function: Box::new(|x, _, _| x) })
            }
            Some(_) => form.error(format!("a pointer has 64 bits, not those of {ty}")),
            None => form.error("there is no such parameter".into()),
        }
    }

    fn store(&mut self, form: &mut Form) -> Decoded<Action> {
        let ty = form.ty_of(|ty| ty != PREDICATE)?;
        let space = form.needs(&[
            ("global", Space::Global),
            ("shared", Space::Shared),
            ("shared::cta", Space::Shared),
            ("shared::cluster", Space::Cluster),
        ])?;
        let width = form.one_of(&[("v2", 2), ("v4", 4)]);
        let operands = self.without_policy(form, 2)?;
        let to = self.address(form, &operands[0], space)?;
        let parts = vector(form, &operands[1], width, ty)?;
        let of = parts.iter().map(|operand| self.any_source(form, operand, ty, Type::serves_loosely));
        let of = of.collect::<Decoded<_>>()?;
        Ok(Action::Store { space, to, bytes: ty.bits() / 8, of })
    }

    /// The operands but for a cache policy, which changes no result.
    fn without_policy<'a>(&mut self, form: &mut Form<'a>, count: usize) -> Decoded<&'a [Operand]> {
        let has_policy = form.flag("L2::cache_hint");
        strip_hints(form);
        let all = form.some_operands(count, count + usize::from(has_policy))?;
        if has_policy {
            match all.get(count) {
                Some(policy) => self.source(form, policy, Type::Bits(64))?,
                None => return form.error("expected a cache policy as the last operand".into()),
            };
        }
        Ok(&all[..count])
    }

    fn atomic(&mut self, opcode: &str, form: &mut Form) -> Decoded<Action> {
        let ty = form.ty_of(|ty| is_word(ty) || matches!(ty, Type::Bits(32 | 64) | Type::Float(Float::F32)))?;
        form.flag("relaxed");
        form.one_of(&SCOPES);
        let space = form.needs(&[
            ("global", Space::Global),
            ("shared", Space::Shared),
            ("shared::cta", Space::Shared),
            ("shared::cluster", Space::Cluster),
        ])?;
        let (whole, bits) = (ty.is_integer(), matches!(ty, Type::Bits(_)));
        let operation = form.needs(&[
            ("add", Atomic::Add),
            ("min", Atomic::Min),
            ("max", Atomic::Max),
            ("and", Atomic::And),
            ("or", Atomic::Or),
            ("xor", Atomic::Xor),
            ("exch", Atomic::Exchange),
            ("cas", Atomic::CompareAndSwap),
            ("inc", Atomic::Increment),
            ("dec", Atomic::Decrement),
        ])?;
        let fits = match operation {
            Atomic::Add => !bits,
            Atomic::Min | Atomic::Max => whole,
            Atomic::Increment | Atomic::Decrement => ty == U32,
            Atomic::Exchange | Atomic::CompareAndSwap => bits && opcode == "atom",
            Atomic::And | Atomic::Or | Atomic::Xor => bits,
        };
        if !fits {
            return form.error(format!("type {ty} is not supported"));
        }
        let sources = if operation == Atomic::CompareAndSwap { 2 } else { 1 };
        let first = usize::from(opcode == "atom");
        let operands = form.some_operands(first + 1 + sources, first + 1 + sources)?;
        let to = operands[..first].iter().map(|to| self.target(form, to, ty)).collect::<Decoded<Vec<_>>>()?;
        let at = self.address(form, &operands[first], space)?;
        let of = operands[first + 1..].iter().map(|of| self.source(form, of, ty)).collect::<Decoded<Vec<_>>>()?;
        let of = [of[0], *of.last().expect("there is one")];
        Ok(Action::Atomic { space, at, ty, operation, to: to.first().copied(), of })
    }

    fn copy(&mut self, form: &mut Form) -> Decoded<Action> {
        form.needs(&[("async", ())])?;
        if form.flag("commit_group") {
            form.operands::<0>()?;
            return Ok(Action::CommitCopies);
        }
        if form.flag("wait_all") {
            form.operands::<0>()?;
            return Ok(Action::WaitAllCopies);
        }
        if form.flag("wait_group") {
            let [Operand::Number(groups)] = form.operands()? else { return form.error("expected a number".into()) };
            return Ok(Action::WaitCopies(constant(form, *groups, U32)? as usize));
        }
        let whole_only = form.needs(&[("cg", true), ("ca", false)])?;
        form.needs(&[("shared", ()), ("shared::cta", ())])?;
        form.needs(&[("global", ())])?;
        let has_policy = form.flag("L2::cache_hint");
        strip_hints(form);
        let operands = form.some_operands(3, 4 + usize::from(has_policy))?;
        let (to, from) =
            (self.address(form, &operands[0], Space::Shared)?, self.address(form, &operands[1], Space::Global)?);
        let bytes = match operands[2] {
            Operand::Number(Number::Whole(16)) => 16,
            Operand::Number(Number::Whole(bytes @ (4 | 8))) if !whole_only => bytes as u32,
            _ => return form.error("expected a size of 4, 8 or 16 bytes, of 16 with .cg".into()),
        };
        let mut rest = &operands[3..];
        if has_policy {
            let Some((policy, before)) = rest.split_last() else {
                return form.error("expected a cache policy as the last operand".into());
            };
            self.source(form, policy, Type::Bits(64))?;
            rest = before;
        }
        let (mut read, mut ignore) = (None, None);
        if let [operand] = rest {
            let is_predicate = match operand {
                Operand::Name(name) => matches!(self.named(name), Some(Named::Register(_, Type::Pred))),
                _ => false,
            };
            if is_predicate {
                ignore = Some(self.source(form, operand, PREDICATE)?);
            } else {
                read = Some(self.source(form, operand, U32)?);
            }
        }
        Ok(Action::Copy { to, from, bytes, read, ignore })
    }

    fn barrier(&mut self, opcode: &str, form: &mut Form) -> Decoded<Action> {
        if opcode == "bar" && form.flag("warp") {
            form.needs(&[("sync", ())])?;
            let [members] = form.operands()?;
            return Ok(Action::WarpBarrier { members: self.source(form, members, B32)? });
        }
        let aligned = form.flag("aligned") || opcode == "bar";
        if opcode == "barrier" && form.flag("cluster") {
            form.operands::<0>()?;
            if form.needs(&[("arrive", true), ("wait", false)])? {
                let release = form.one_of(&[("release", true), ("relaxed", false)]).unwrap_or(true);
                return Ok(Action::ClusterArrive { release, aligned });
            }
            form.flag("acquire");
            return Ok(Action::ClusterWait { aligned });
        }
        form.flag("cta");
        if form.flag("red") {
            let mode = form.needs(&[
                ("popc", BarrierReduction::Count),
                ("and", BarrierReduction::All),
                ("or", BarrierReduction::Any),
            ])?;
            let ty = form.ty_of(|ty| ty == if mode == BarrierReduction::Count { U32 } else { PREDICATE })?;
            let operands = form.some_operands(3, 4)?;
            let (to, id) = (self.target(form, &operands[0], ty)?, self.source(form, &operands[1], U32)?);
            let threads = if operands.len() == 4 { Some(self.source(form, &operands[2], U32)?) } else { None };
            let (of, negated) = self.predicate(form, &operands[operands.len() - 1])?;
            let reduces = Some(Reduces { to, of, negated, mode });
            return Ok(Action::Barrier { id, threads, aligned, waits: true, reduces });
        }
        let waits = form.needs(&[("sync", true), ("arrive", false)])?;
        let operands = form.some_operands(if waits { 1 } else { 2 }, 2)?;
        let id = self.source(form, &operands[0], U32)?;
        let threads = operands.get(1).map(|threads| self.source(form, threads, U32)).transpose()?;
        Ok(Action::Barrier { id, threads, aligned, waits, reduces: None })
    }

    fn fence(&mut self, opcode: &str, form: &mut Form) -> Decoded<Action> {
        form.operands::<0>()?;
        if opcode == "membar" {
            let beyond_cta = form.needs(&[("cta", false), ("gl", true), ("sys", true)])?;
            return Ok(Action::Fence { beyond_cta });
        }
        form.one_of(&[("sc", ()), ("acq_rel", ())]);
        Ok(Action::Fence { beyond_cta: form.needs(&SCOPES)? })
    }

    fn shuffle(&mut self, form: &mut Form) -> Decoded<Action> {
        form.needs(&[("sync", ())])?;
        let mode = form.needs(&[
            ("up", Shuffle::Up),
            ("down", Shuffle::Down),
            ("bfly", Shuffle::Butterfly),
            ("idx", Shuffle::Index),
        ])?;
        let ty = form.ty_of(|ty| ty == B32)?;
        let [to, of, by, clamp, members] = form.operands()?;
        let [Some(to), valid] = self.pair(form, to, ty, PREDICATE)? else {
            return form.error("expected a register".into());
        };
        let [of, members] = [of, members].map(|operand| self.source(form, operand, ty));
        let [by, clamp] = [by, clamp].map(|operand| self.source(form, operand, B32));
        Ok(Action::Shuffle { mode, to, valid, of: of?, by: by?, clamp: clamp?, members: members? })
    }

    fn vote(&mut self, form: &mut Form) -> Decoded<Action> {
        form.needs(&[("sync", ())])?;
        let mode =
            form.needs(&[("all", Vote::All), ("any", Vote::Any), ("uni", Vote::Uniform), ("ballot", Vote::Ballot)])?;
        let ty = form.ty_of(|ty| ty == if mode == Vote::Ballot { B32 } else { PREDICATE })?;
        let [to, of, members] = form.operands()?;
        let (of, negated) = self.predicate(form, of)?;
        Ok(Action::Vote {
            mode,
            to: self.target(form, to, ty)?,
            of,
            negated,
            members: self.source(form, members, B32)?,
        })
    }

    fn redux(&mut self, form: &mut Form) -> Decoded<Action> {
        form.needs(&[("sync", ())])?;
        let ty = form.ty_of(|ty| ty.bits() == 32 && !is_float(ty))?;
        let function: Function = if ty.is_integer() {
            match form.needs(&[("add", 0), ("min", 1), ("max", 2)])? {
                0 => Box::new(|a, b, _| a.wrapping_add(b) & mask(32)),
                1 => Box::new(move |a, b, _| whole(ty, a).min(whole(ty, b)) as u64 & mask(32)),
                _ => Box::new(move |a, b, _| whole(ty, a).max(whole(ty, b)) as u64 & mask(32)),
            }
        } else {
            match form.needs(&[("and", 0), ("or", 1), ("xor", 2)])? {
                0 => Box::new(|a, b, _| a & b),
                1 => Box::new(|a, b, _| a | b),
                _ => Box::new(|a, b, _| a ^ b),
            }
        };
        let [to, of, members] = form.operands()?;
        let (of, members) = (self.source(form, of, ty)?, self.source(form, members, B32)?);
        Ok(Action::Reduce { to: self.target(form, to, ty)?, of, members, function })
    }
}

fn strip_hints(form: &mut Form) {
    form.modifiers.retain(|modifier| !HINTS.contains(modifier));
}

/// The type of `parts` parts of a `ty`.
fn part_of(form: &Form, ty: Type, parts: usize) -> Decoded<Type> {
    match (ty, parts) {
        (Type::Bits(bits), 2 | 4) if bits / parts as u32 >= 16 => Ok(Type::Bits(bits / parts as u32)),
        _ => form.error(format!("{parts} parts of {ty} are not supported")),
    }
}

/// One operand, or the parts of a vector of `width`.
fn vector<'a>(form: &Form, operand: &'a Operand, width: Option<u32>, ty: Type) -> Decoded<&'a [Operand]> {
    match (operand, width) {
        (Operand::Vector(parts), Some(width)) if parts.len() == width as usize => {
            if width * ty.bits() > 128 {
                return form.error(format!("{width} of {ty} are more than 16 bytes"));
            }
            Ok(parts)
        }
        (Operand::Vector(parts), _) => form.error(format!("a vector of {} is not what the modifier says", parts.len())),
        (_, Some(width)) => form.error(format!("expected a vector of {width}")),
        (operand, None) => Ok(std::slice::from_ref(operand)),
    }
}

/// The bits of a number as a `ty`.
fn constant(form: &Form, number: Number, ty: Type) -> Decoded<u64> {
    let bits = ty.bits();
    match (number, ty) {
        (Number::Whole(x), Type::Bits(_) | Type::Unsigned(_) | Type::Signed(_))
            if -(1_i128 << (bits - 1)) <= x && x < 1_i128 << bits =>
        {
            Ok(x as u64 & mask(bits))
        }
        (Number::Single(x), Type::Float(Float::F32) | Type::Bits(32)) => Ok(x.into()),
        (Number::Decimal(x), Type::Float(Float::F32)) => Ok((x as f32).to_bits().into()),
        (Number::Whole(x @ (0 | 1)), Type::Pred) => Ok(x as u64),
        _ => form.error(format!("{number:?} is not a number of {ty}")),
    }
}

/// What a special register holds, and its width.
fn special(name: &str) -> Option<(Fill, u32)> {
    let (register, axis) = match name.rsplit_once('.') {
        Some((register, axis)) => (register, ["x", "y", "z"].iter().position(|&word| word == axis)?),
        None => (name, 3),
    };
    let special = match (register, axis) {
        ("WARP_SZ", 3) => return Some((Fill::Value(32), 32)),
        ("%tid", 0..3) => Special::Tid(axis),
        ("%ntid", 0..3) => Special::Ntid(axis),
        ("%ctaid", 0..3) => Special::Ctaid(axis),
        ("%nctaid", 0..3) => Special::Nctaid(axis),
        ("%cluster_ctaid", 0..3) => Special::ClusterCtaid(axis),
        ("%cluster_nctaid", 0..3) => Special::ClusterNctaid(axis),
        ("%clusterid", 0..3) => Special::ClusterId(axis),
        ("%nclusterid", 0..3) => Special::Nclusterid(axis),
        ("%cluster_ctarank", 3) => Special::ClusterCtarank,
        ("%cluster_nctarank", 3) => Special::ClusterNctarank,
        ("%laneid", 3) => Special::Laneid,
        ("%warpid", 3) => Special::Warpid,
        ("%nwarpid", 3) => Special::Nwarpid,
        ("%lanemask_lt", 3) => Special::LanesBelow,
        ("%lanemask_le", 3) => Special::LanesUpTo,
        ("%lanemask_ge", 3) => Special::LanesFrom,
        ("%lanemask_gt", 3) => Special::LanesAbove,
        ("%lanemask_eq", 3) => Special::LaneBit,
        _ => return None,
    };
    Some((Fill::Special(special), 32))
}

impl Action {
    /// The slots that it reads.
    fn sources(&self) -> Vec<Slot> {
        match self {
            Action::Compute { of, .. } | Action::Compare { of, .. } => of.to_vec(),
            Action::Approximate { of, .. } => of.to_vec(),
            Action::Split { of, .. } => vec![*of],
            Action::Join { of, .. } => of.clone(),
            Action::Map { address, rank, .. } => vec![*address, *rank],
            Action::Load { from, .. } => vec![from.base],
            Action::Store { to, of, .. } => of.iter().copied().chain([to.base]).collect(),
            Action::Atomic { at, of, .. } => vec![at.base, of[0], of[1]],
            Action::Copy { to, from, read, ignore, .. } => {
                [to.base, from.base].into_iter().chain(*read).chain(*ignore).collect()
            }
            Action::Barrier { id, threads, reduces, .. } => {
                let of = reduces.as_ref().map(|reduces| reduces.of);
                [*id].into_iter().chain(*threads).chain(of).collect()
            }
            Action::WarpBarrier { members } => vec![*members],
            Action::Shuffle { of, by, clamp, members, .. } => vec![*of, *by, *clamp, *members],
            Action::Vote { of, members, .. } | Action::Reduce { of, members, .. } => vec![*of, *members],
            Action::Elect { members, .. } => vec![*members],
            Action::CommitCopies
            | Action::WaitCopies(_)
            | Action::WaitAllCopies
            | Action::Branch { .. }
            | Action::Exit
            | Action::ClusterArrive { .. }
            | Action::ClusterWait { .. }
            | Action::Fence { .. }
            | Action::ActiveMask { .. }
            | Action::Nothing => Vec::new(),
        }
    }
}
