//! The first pass of reading: PTX text becomes directives, declarations and instructions, each with its line.
//! [`super::decode`] gives them their meaning.

use winnow::ascii::{digit0, digit1, multispace1, till_line_ending};
use winnow::combinator::{alt, cut_err, delimited, eof, not, opt, peek, preceded, repeat, terminated};
use winnow::error::{AddContext, ErrMode, ParserError};
use winnow::stream::{LocatingSlice, Location as _, Stateful, Stream};
use winnow::token::{one_of, take_until, take_while};
use winnow::{ModalResult, Parser};

use super::PtxInterpretError;

/// The longest text of a module that is read, in bytes.
const LONGEST_TEXT: usize = 16 << 20;
/// The most registers that one `%r<N>` declares.
const MOST_REGISTERS: u32 = 1 << 16;

/// A module as it is written, before its names are resolved.
#[derive(Debug)]
pub(super) struct ModuleText {
    pub(super) shared: Vec<SharedVariable>,
    pub(super) entries: Vec<EntryText>,
}

/// A `.entry` function as it is written.
#[derive(Debug)]
pub(super) struct EntryText {
    pub(super) line: usize,
    pub(super) name: String,
    /// The names and types of the parameters, in order.
    pub(super) parameters: Vec<(String, String)>,
    pub(super) limits: Vec<LimitDirective>,
    pub(super) body: Vec<PtxStatement>,
}

/// A directive that limits launches, such as `.reqntid 256, 1, 1`.
#[derive(Debug)]
pub(super) struct LimitDirective {
    pub(super) line: usize,
    pub(super) name: String,
    pub(super) numbers: Vec<u32>,
}

/// An array or a scalar of shared memory.
#[derive(Clone, Debug)]
pub(super) struct SharedVariable {
    pub(super) line: usize,
    pub(super) name: String,
    pub(super) align: Option<u32>,
    pub(super) ty: String,
    /// The number of elements; None for `name[]`, whose extent the launch gives.
    pub(super) elements: Option<u32>,
}

#[derive(Debug)]
pub(super) enum PtxStatement {
    /// `{`, which opens a scope of names.
    Open,
    /// `}`, which closes the innermost scope.
    Close,
    /// `name:`, the target of branches.
    Label {
        line: usize,
        name: String,
    },
    /// `.reg .type %name, %name<count>;`, a declaration of registers.
    Registers {
        line: usize,
        ty: String,
        names: Vec<(String, Option<u32>)>,
    },
    Shared(SharedVariable),
    Instruction(InstructionText),
}

#[derive(Debug)]
pub(super) struct InstructionText {
    pub(super) line: usize,
    /// The guard `@name` or `@!name`: whether it is negated, and the name.
    pub(super) guard: Option<(bool, String)>,
    /// The opcode with its modifiers, such as `ld.shared.f32`.
    pub(super) name: String,
    pub(super) operands: Vec<OperandText>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum OperandText {
    /// A register, a variable or a label.
    Name(String),
    /// `a|b`, two targets of one instruction.
    Pair(String, String),
    /// `!name`, the negation of a predicate.
    Not(String),
    Number(NumberText),
    /// `{a, b}`, a vector of two or four operands.
    Vector(Vec<OperandText>),
    /// `[base + offset]`, an address in bytes.
    Address(Box<OperandText>, i64),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum NumberText {
    Whole(i128),
    /// A number such as `1.5`, read as an f64.
    Decimal(f64),
    /// The bits of an f32, written as `0f3F800000`.
    Single(u32),
}

/// The text that is not yet read, and the offsets at which the lines of the whole text end.
type PtxInput<'t> = Stateful<LocatingSlice<&'t str>, &'t [usize]>;

/// A syntax error and its offset in the text.
#[derive(Debug)]
struct PtxSyntaxError {
    at: usize,
    problem: PtxSyntaxProblem,
}

#[derive(Debug)]
enum PtxSyntaxProblem {
    /// The text has something else; empty until a parser has named what it expects.
    Expected(String),
    /// The text is of the expected form but not supported.
    Wrong(String),
}

impl<'t> ParserError<PtxInput<'t>> for PtxSyntaxError {
    type Inner = Self;

    fn from_input(input: &PtxInput<'t>) -> Self {
        Self { at: input.current_token_start(), problem: PtxSyntaxProblem::Expected(String::new()) }
    }

    fn or(self, _: Self) -> Self {
        Self { problem: PtxSyntaxProblem::Expected(String::new()), ..self }
    }

    fn into_inner(self) -> Result<Self, Self> {
        Ok(self)
    }
}

/// Names what was expected. The first name, from the parser closest to the place, is kept.
impl<I: Stream, C: ToString> AddContext<I, C> for PtxSyntaxError {
    fn add_context(mut self, _: &I, _: &I::Checkpoint, what: C) -> Self {
        if let PtxSyntaxProblem::Expected(expected) = &mut self.problem
            && expected.is_empty()
        {
            *expected = what.to_string();
        }
        self
    }
}

type PtxParseResult<T> = ModalResult<T, PtxSyntaxError>;

/// A parser of a part of the text.
trait PtxParser<'t, T>: Parser<PtxInput<'t>, T, ErrMode<PtxSyntaxError>> {}

impl<'t, T, P: Parser<PtxInput<'t>, T, ErrMode<PtxSyntaxError>>> PtxParser<'t, T> for P {}

/// Parses the text of a whole module.
pub(super) fn parse(text: &str) -> Result<ModuleText, PtxInterpretError> {
    if text.len() > LONGEST_TEXT {
        let problem = format!("{} bytes of text; the longest module that is read has {LONGEST_TEXT}", text.len());
        return Err(PtxInterpretError::Text { line: 1, problem });
    }
    // Lines are computed from offsets, and only for what keeps one: the parser itself counts none.
    let line_ends: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
    let input = Stateful { input: LocatingSlice::new(text), state: line_ends.as_slice() };
    module.parse(input).map_err(|error| {
        let PtxSyntaxError { at, problem } = error.into_inner();
        // An error points to the next token and not to the space before it.
        let at = text.len() - text[at..].trim_start().len();
        let problem = match problem {
            PtxSyntaxProblem::Expected(what) => format!("expected {what}, found {}", token_of(&text[at..])),
            PtxSyntaxProblem::Wrong(problem) => problem,
        };
        PtxInterpretError::Text { line: line_of(at, &line_ends), problem }
    })
}

/// Returns the first token of `text`, for messages.
fn token_of(text: &str) -> String {
    let Some(first) = text.chars().next() else { return "the end of the text".into() };
    let name = |text: &str| text[..text.find(|c| !is_name(c)).unwrap_or(text.len())].to_string();
    match first {
        '.' => format!(".{}", name(&text[1..])),
        _ if is_name(first) => name(text),
        _ if first.is_ascii_punctuation() => first.into(),
        _ => format!("{first:?}"),
    }
}

fn line_of(at: usize, line_ends: &[usize]) -> usize {
    1 + line_ends.partition_point(|&end| end < at)
}

fn line(input: &mut PtxInput) -> PtxParseResult<usize> {
    space(input)?;
    Ok(line_of(input.current_token_start(), input.state))
}

fn wrong<T>(input: &PtxInput, problem: String) -> PtxParseResult<T> {
    Err(ErrMode::Cut(PtxSyntaxError { at: input.current_token_start(), problem: PtxSyntaxProblem::Wrong(problem) }))
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%')
}

fn space(input: &mut PtxInput) -> PtxParseResult<()> {
    let block = delimited("/*", take_until(0.., "*/"), "*/");
    repeat(0.., alt((multispace1.void(), ("//", till_line_ending).void(), block.void()))).parse_next(input)
}

fn token<'t, T>(token: impl PtxParser<'t, T>) -> impl PtxParser<'t, T> {
    preceded(space, token)
}

fn mark<'t>(mark: char) -> impl PtxParser<'t, char> {
    token(mark).context(mark)
}

fn end(input: &mut PtxInput) -> PtxParseResult<char> {
    cut_err(mark(';')).parse_next(input)
}

/// Parses items separated by commas; a comma must be followed by an item.
fn list<'t, T>(mut item: impl PtxParser<'t, T>) -> impl PtxParser<'t, Vec<T>> {
    move |input: &mut PtxInput<'t>| {
        let mut items = vec![item.parse_next(input)?];
        while opt(mark(',')).parse_next(input)?.is_some() {
            // A comma promises another item, so that its absence is an error and no end of the list.
            items.push(cut_err(item.by_ref()).parse_next(input)?);
        }
        Ok(items)
    }
}

fn name<'t>(input: &mut PtxInput<'t>) -> PtxParseResult<&'t str> {
    let name = take_while(1.., is_name).verify(|name: &str| !name.starts_with(|c: char| c.is_ascii_digit()));
    token(name).context("a name").parse_next(input)
}

/// Parses `.name`, and returns the name.
fn directive<'t>(input: &mut PtxInput<'t>) -> PtxParseResult<&'t str> {
    token(preceded('.', take_while(1.., is_name))).context("a directive").parse_next(input)
}

/// Parses a whole number that is not negative.
fn count(input: &mut PtxInput) -> PtxParseResult<u32> {
    let count = number.verify_map(|number| match number {
        NumberText::Whole(whole) => u32::try_from(whole).ok(),
        _ => None,
    });
    count.context("a whole number").parse_next(input)
}

/// Parses a number: `-1`, `0xFF`, `1U`, `1.5e-3` or `0f3F800000`.
fn number(input: &mut PtxInput) -> PtxParseResult<NumberText> {
    let hex = |digits: usize| take_while(digits..=digits, |c: char| c.is_ascii_hexdigit());
    let single = preceded(alt(("0f", "0F")), hex(8)).verify_map(|bits: &str| u32::from_str_radix(bits, 16).ok());
    let double = preceded(alt(("0d", "0D")), hex(16)).verify_map(|bits: &str| u64::from_str_radix(bits, 16).ok());
    let digits = take_while(1..=16, |c: char| c.is_ascii_hexdigit());
    let sixteen = preceded(alt(("0x", "0X")), digits).verify_map(|text: &str| i128::from_str_radix(text, 16).ok());
    let two = preceded(alt(("0b", "0B")), take_while(1..=64, ['0', '1']))
        .verify_map(|text: &str| i128::from_str_radix(text, 2).ok());
    // A leading 0 would make it octal.
    let ten = take_while(1..=20, |c: char| c.is_ascii_digit())
        .verify_map(|text: &str| text.parse().ok().filter(|_| text == "0" || !text.starts_with('0')));
    let exponent = (one_of(['e', 'E']), opt(one_of(['+', '-'])), digit1);
    let decimal = (digit1, '.', digit0, opt(exponent)).take().verify_map(|text: &str| text.parse().ok());
    // The order matters: a decimal begins like a whole number, and 0f… and 0d… like a 0.
    let whole = terminated(alt((sixteen, two, ten)), opt('U'));
    let value = alt((
        single.map(NumberText::Single),
        double.map(|bits| NumberText::Decimal(f64::from_bits(bits))),
        decimal.map(NumberText::Decimal),
        whole.map(NumberText::Whole),
    ));
    let value = terminated(value, not(one_of(is_name)));
    let (minus, value) = (token(opt('-')), value).context("a number").parse_next(input)?;
    Ok(match value {
        value if minus.is_none() => value,
        NumberText::Whole(whole) => NumberText::Whole(-whole),
        NumberText::Decimal(decimal) => NumberText::Decimal(-decimal),
        NumberText::Single(bits) => NumberText::Single(bits ^ 1 << 31),
    })
}

fn module(input: &mut PtxInput) -> PtxParseResult<ModuleText> {
    let mut text = ModuleText { shared: Vec::new(), entries: Vec::new() };
    loop {
        space(input)?;
        if opt(eof).parse_next(input)?.is_some() {
            return Ok(text);
        }
        let start = input.checkpoint();
        match cut_err(directive).parse_next(input)? {
            "version" => {
                cut_err(token((digit1, '.', digit1))).context("a version").parse_next(input)?;
            }
            "target" => {
                cut_err(list(name)).parse_next(input)?;
            }
            "address_size" => {
                cut_err(count.verify(|&bits| bits == 64)).context("addresses of 64 bits").parse_next(input)?;
            }
            // Linkage of the next declaration, which does not matter to one module.
            "visible" | "extern" => {}
            "shared" => text.shared.push(variable(input)?),
            "entry" => text.entries.push(entry(input)?),
            other => {
                // The error is to point at the directive itself, so the parser goes back to its begin.
                input.reset(&start);
                space(input)?;
                return wrong(input, format!("directive .{other} is not supported"));
            }
        }
    }
}

fn entry(input: &mut PtxInput) -> PtxParseResult<EntryText> {
    let line = line(input)?;
    let name = cut_err(name).parse_next(input)?.to_string();
    let parameters = opt(parameters).parse_next(input)?.unwrap_or_default();
    let mut limits = Vec::new();
    // Directives of the launch's limits may come in any order before the body.
    while opt(mark('{')).parse_next(input)?.is_none() {
        limits.push(limit(input)?);
    }
    Ok(EntryText { line, name, parameters, limits, body: body(input)? })
}

fn parameters(input: &mut PtxInput) -> PtxParseResult<Vec<(String, String)>> {
    mark('(').parse_next(input)?;
    if opt(mark(')')).parse_next(input)?.is_some() {
        return Ok(Vec::new());
    }
    let parameters = list(cut_err(parameter)).parse_next(input)?;
    cut_err(mark(')')).parse_next(input)?;
    Ok(parameters)
}

/// Parses a parameter, such as `.param .u64 .ptr .global .align 16 name`, into its name and type.
fn parameter(input: &mut PtxInput) -> PtxParseResult<(String, String)> {
    let param = directive.verify(|&word: &&str| word == "param").context(".param");
    let ty = preceded(param, directive).parse_next(input)?.to_string();
    loop {
        match opt(directive).parse_next(input)? {
            Some("ptr" | "global") => {}
            Some("align") => {
                cut_err(count).parse_next(input)?;
            }
            Some(other) => return wrong(input, format!("a parameter with .{other} is not supported")),
            None => return name.map(|name| (name.to_string(), ty.clone())).parse_next(input),
        }
    }
}

fn limit(input: &mut PtxInput) -> PtxParseResult<LimitDirective> {
    let line = line(input)?;
    let name = cut_err(directive).parse_next(input)?.to_string();
    if name == "pragma" {
        pragma(input)?;
        return Ok(LimitDirective { line, name, numbers: Vec::new() });
    }
    let numbers = opt(list(count)).parse_next(input)?.unwrap_or_default();
    Ok(LimitDirective { line, name, numbers })
}

/// Parses the text `"…";` of a pragma, which does not change results.
fn pragma(input: &mut PtxInput) -> PtxParseResult<()> {
    let text = delimited(mark('"'), take_until(0.., '"'), '"').context("a string");
    cut_err(terminated(text, end)).void().parse_next(input)
}

/// Parses the rest of a `.shared` declaration, such as `.align 16 .b8 name[64];`.
fn variable(input: &mut PtxInput) -> PtxParseResult<SharedVariable> {
    let line = line(input)?;
    let mut ty = cut_err(directive).parse_next(input)?;
    let mut align = None;
    if ty == "align" {
        align = Some(cut_err(count).parse_next(input)?);
        ty = cut_err(directive).parse_next(input)?;
    }
    let name = cut_err(name).parse_next(input)?.to_string();
    let extent = delimited(mark('['), opt(count), cut_err(mark(']')));
    // An array without brackets is one element; with empty ones its size is the launch's.
    let elements = opt(extent).parse_next(input)?.unwrap_or(Some(1));
    end(input)?;
    Ok(SharedVariable { line, name, align, ty: ty.to_string(), elements })
}

/// Parses the statements up to the `}` that ends the entry.
fn body(input: &mut PtxInput) -> PtxParseResult<Vec<PtxStatement>> {
    let mut body = Vec::new();
    let mut depth = 0;
    loop {
        let line = line(input)?;
        let next = opt(alt(('{', '}', peek('.')))).parse_next(input)?;
        match next {
            Some('{') => {
                depth += 1;
                body.push(PtxStatement::Open);
            }
            Some('}') if depth == 0 => return Ok(body),
            Some('}') => {
                depth -= 1;
                body.push(PtxStatement::Close);
            }
            // A dot begins a declaration; anything else is a label or an instruction.
            Some(_) => body.extend(declaration(input, line)?),
            None => {
                // A label is a name before a colon; two colons are part of an instruction's name.
                let label = terminated(name, (token(':'), not(':')));
                match opt(label).parse_next(input)? {
                    Some(name) => body.push(PtxStatement::Label { line, name: name.to_string() }),
                    None => body.push(PtxStatement::Instruction(cut_err(instruction).parse_next(input)?)),
                }
            }
        }
    }
}

fn declaration(input: &mut PtxInput, line: usize) -> PtxParseResult<Option<PtxStatement>> {
    let start = input.checkpoint();
    match cut_err(directive).parse_next(input)? {
        "reg" => {
            let ty = cut_err(directive).parse_next(input)?.to_string();
            let times = delimited(mark('<'), cut_err(count), cut_err(mark('>')));
            let one = (name, opt(times)).map(|(name, times)| (name.to_string(), times));
            let names = cut_err(list(one)).parse_next(input)?;
            if let Some((name, _)) = names.iter().find(|(_, times)| times.is_some_and(|n| n > MOST_REGISTERS)) {
                return wrong(input, format!("more than {MOST_REGISTERS} registers of the name {name}"));
            }
            end(input)?;
            Ok(Some(PtxStatement::Registers { line, ty, names }))
        }
        "shared" => variable(input).map(|variable| Some(PtxStatement::Shared(variable))),
        // The line of the source that this was made from.
        "loc" => till_line_ending.parse_next(input).map(|_| None),
        "pragma" => pragma(input).map(|()| None),
        other => {
            input.reset(&start);
            space(input)?;
            wrong(input, format!("directive .{other} is not supported"))
        }
    }
}

/// Parses an instruction, such as `@!%p ld.shared.f32 %f, [%r + 4];`.
fn instruction(input: &mut PtxInput) -> PtxParseResult<InstructionText> {
    let negated_name = (token(opt('!')), name).map(|(not, name)| (not.is_some(), name.to_string()));
    let guard = opt(preceded(mark('@'), cut_err(negated_name))).parse_next(input)?;
    let line = line(input)?;
    let word = || take_while(1.., |c: char| c.is_ascii_alphanumeric() || c == '_');
    let rest = repeat::<_, _, (), _, _>(0.., (alt((".", "::")), word()));
    let name = (word(), rest).take().context("an instruction").parse_next(input)?.to_string();
    let operands = opt(list(operand)).parse_next(input)?.unwrap_or_default();
    cut_err(mark(';')).context("an operand, or ;").parse_next(input)?;
    Ok(InstructionText { line, guard, name, operands })
}

fn operand(input: &mut PtxInput) -> PtxParseResult<OperandText> {
    let vector = delimited(mark('{'), cut_err(list(simple)), cut_err(mark('}')));
    alt((vector.map(OperandText::Vector), address, simple)).context("an operand").parse_next(input)
}

fn simple(input: &mut PtxInput) -> PtxParseResult<OperandText> {
    let dotted = (name, opt(preceded('.', one_of(['x', 'y', 'z'])))).map(|(name, part)| match part {
        Some(part) => format!("{name}.{part}"),
        None => name.to_string(),
    });
    let named = (dotted, opt(preceded(mark('|'), cut_err(name)))).map(|(name, other)| match other {
        Some(other) => OperandText::Pair(name, other.to_string()),
        None => OperandText::Name(name),
    });
    let negated = preceded(mark('!'), cut_err(name)).map(|name| OperandText::Not(name.to_string()));
    alt((negated, number.map(OperandText::Number), named)).parse_next(input)
}

/// Parses an address: `[base]`, `[base + 16]` or `[base + -16]`.
fn address(input: &mut PtxInput) -> PtxParseResult<OperandText> {
    let base = cut_err(alt((number.map(OperandText::Number), name.map(|name| OperandText::Name(name.to_string())))));
    let offset = opt(preceded(mark('+'), cut_err(number)));
    let (base, offset) = delimited(mark('['), (base, offset), cut_err(mark(']'))).parse_next(input)?;
    let offset = match offset {
        None => 0,
        Some(NumberText::Whole(offset)) if i32::try_from(offset).is_ok() => offset as i64,
        Some(_) => return wrong(input, "expected an offset of 32 bits".to_string()),
    };
    Ok(OperandText::Address(Box::new(base), offset))
}
