//! Parses MLIR text in its generic form into a tree of operations, each with its line. [`super::check`] gives them a
//! meaning.

use std::collections::BTreeMap;

use winnow::ascii::{dec_uint, digit0, digit1, multispace1, till_line_ending};
use winnow::combinator::{
    alt, cut_err, delimited, eof, not, opt, preceded, repeat, repeat_till, separated, separated_pair, terminated,
};
use winnow::error::{AddContext, ErrMode, ParserError};
use winnow::stream::{LocatingSlice, Location as _, Stateful, Stream};
use winnow::token::{one_of, take_till, take_while};
use winnow::{ModalResult, Parser};

use super::MosaicInterpretError;
use super::value::{ArrayType, ElementKind, MemorySpace, MosaicType};

/// Largest size of a module's text, bytes.
const LONGEST_TEXT: usize = 16 << 20;
/// Largest depth of regions within regions, and of attributes within attributes.
const DEEPEST: usize = 32;
/// Largest number of dimensions of a vector or memref.
const MOST_DIMENSIONS: usize = 8;

/// An operation as it is written in the text.
#[derive(Debug)]
pub(super) struct MosaicOperation {
    pub(super) line: usize,
    pub(super) name: String,
    pub(super) results: Vec<ValueDefinition>,
    pub(super) operands: Vec<ValueUse>,
    pub(super) attributes: BTreeMap<String, MosaicAttribute>,
    pub(super) regions: Vec<MosaicRegion>,
    pub(super) operand_types: Vec<MosaicType>,
    pub(super) result_types: Vec<MosaicType>,
}

/// A definition `%name` or `%name:count` on the left of an operation.
#[derive(Debug)]
pub(super) struct ValueDefinition {
    pub(super) name: String,
    pub(super) count: usize,
}

/// An operand `%name` or `%name#index` of an operation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ValueUse {
    pub(super) name: String,
    pub(super) index: usize,
}

/// A region of one block, or an empty one.
#[derive(Debug, Default)]
pub(super) struct MosaicRegion {
    pub(super) parameters: Vec<(ValueUse, MosaicType)>,
    pub(super) operations: Vec<MosaicOperation>,
}

/// The value of an attribute, as far as modules use them.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum MosaicAttribute {
    /// A whole number without a type, or with the type i64, which MLIR then assumes.
    Whole(i64),
    /// A number of another type as it is spelt, or `true` or `false`.
    Scalar(String, MosaicType),
    /// A vector with one value, `dense<SCALAR> : type`.
    Splat(String, MosaicType),
    /// A list of integers, `array<type: numbers>`.
    Array(Vec<i64>),
    List(Vec<MosaicAttribute>),
    Dictionary(BTreeMap<String, MosaicAttribute>),
    /// The name of a function, `@name`.
    Symbol(String),
    Text(String),
    /// An attribute of a dialect, `#dialect.name<…>`, as written.
    Opaque(String),
    FunctionType(Vec<MosaicType>, Vec<MosaicType>),
}

/// The rest of the text, with the ends of all lines.
type ParseInput<'t> = Stateful<LocatingSlice<&'t str>, &'t [usize]>;

/// A mistake in the text, with its offset.
#[derive(Debug)]
struct MosaicMistake {
    at: usize,
    problem: ParseProblem,
}

#[derive(Debug)]
enum ParseProblem {
    /// The text does not continue as expected; empty while the expectation is unknown.
    Expected(String),
    /// The text continues as expected, but its value is wrong.
    Wrong(String),
}

impl MosaicMistake {
    fn into_error(self, text: &str, line_ends: &[usize]) -> MosaicInterpretError {
        let problem = match self.problem {
            ParseProblem::Expected(what) => format!("expected {what}, found {}", token_of(&text[self.at..])),
            ParseProblem::Wrong(problem) => problem,
        };
        MosaicInterpretError::Text { line: line_of(self.at, line_ends), problem }
    }
}

/// Returns the first token of `text`, for an error message.
fn token_of(text: &str) -> String {
    let Some(first) = text.chars().next() else { return "the end of the text".into() };
    match first {
        '-' | '"' | '%' | '@' | '^' | '#' => text[..1].to_string() + names_of(&text[1..]),
        _ if is_name(first) => names_of(text).into(),
        _ if first.is_ascii_punctuation() => first.into(),
        _ => format!("{first:?}"),
    }
}

fn names_of(text: &str) -> &str {
    &text[..text.find(|c| !is_name(c)).unwrap_or(text.len())]
}

fn line_of(at: usize, line_ends: &[usize]) -> usize {
    1 + line_ends.partition_point(|&end| end < at)
}

impl<'t> ParserError<ParseInput<'t>> for MosaicMistake {
    type Inner = Self;

    fn from_input(input: &ParseInput<'t>) -> Self {
        Self { at: input.current_token_start(), problem: ParseProblem::Expected(String::new()) }
    }

    /// Forgets the expectations of both alternatives: the context around them has the expectation.
    fn or(self, _: Self) -> Self {
        Self { problem: ParseProblem::Expected(String::new()), ..self }
    }

    fn into_inner(self) -> Result<Self, Self> {
        Ok(self)
    }
}

/// Notes an expectation, unless one closer to the place is already known.
impl<I: Stream, C: ToString> AddContext<I, C> for MosaicMistake {
    fn add_context(mut self, _: &I, _: &I::Checkpoint, what: C) -> Self {
        if let ParseProblem::Expected(expected) = &mut self.problem
            && expected.is_empty()
        {
            *expected = what.to_string();
        }
        self
    }
}

type MosaicParsed<T> = ModalResult<T, MosaicMistake>;

/// A parser of a part of the text.
trait MosaicReads<'t, T>: Parser<ParseInput<'t>, T, ErrMode<MosaicMistake>> {}

impl<'t, T, P: Parser<ParseInput<'t>, T, ErrMode<MosaicMistake>>> MosaicReads<'t, T> for P {}

/// Parses the only operation that `text` holds.
pub(super) fn parse(text: &str) -> Result<MosaicOperation, MosaicInterpretError> {
    if text.len() > LONGEST_TEXT {
        let problem = format!("{} bytes of text; the longest module that is read has {LONGEST_TEXT}", text.len());
        return Err(MosaicInterpretError::Text { line: 1, problem });
    }
    // Errors name a line: the ends of lines are found once.
    let line_ends: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
    let input = Stateful { input: LocatingSlice::new(text), state: line_ends.as_slice() };
    let end = token(eof).context("the end of the text after the module");
    let mut module = terminated(|input: &mut ParseInput| operation(input, 0), end);
    module.parse(input).map_err(|error| error.into_inner().into_error(text, &line_ends))
}

fn wrong(input: &ParseInput, problem: String) -> ErrMode<MosaicMistake> {
    ErrMode::Cut(MosaicMistake { at: input.current_token_start(), problem: ParseProblem::Wrong(problem) })
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '$')
}

fn space(input: &mut ParseInput) -> MosaicParsed<()> {
    repeat(0.., alt((multispace1.void(), ("//", till_line_ending).void()))).parse_next(input)
}

fn token<'t, T>(token: impl MosaicReads<'t, T>) -> impl MosaicReads<'t, T> {
    preceded(space, token)
}

fn mark<'t>(mark: char) -> impl MosaicReads<'t, char> {
    token(mark).context(mark)
}

/// Parses `inside`, which must follow if `open` is there.
fn after<'t, T>(open: char, inside: impl MosaicReads<'t, T>) -> impl MosaicReads<'t, T> {
    preceded(mark(open), cut_err(inside))
}

/// Parses items with commas between them, up to `close`.
fn until<'t, T>(close: char, item: impl MosaicReads<'t, T>) -> impl MosaicReads<'t, Vec<T>> {
    let end = cut_err(token(close)).context(format!(", or {close}"));
    alt((mark(close).map(|_| Vec::new()), terminated(separated(1.., cut_err(item), mark(',')), end)))
}

/// Parses a keyword, a type, a number or extents: `array`, `vector`, `f32`, `-1.0e+00`, `16x128xf32`; it must come
/// after `space`.
fn bare_word<'t>(input: &mut ParseInput<'t>) -> MosaicParsed<&'t str> {
    let fraction = opt(('.', digit0));
    let with_signed_exponent = (opt('-'), digit1, fraction, one_of(['e', 'E']), one_of(['+', '-']), digit1);
    let plain = (opt('-'), take_while(1.., is_name));
    alt((with_signed_exponent.take(), plain.take())).parse_next(input)
}

fn word<'t>(input: &mut ParseInput<'t>) -> MosaicParsed<&'t str> {
    token(bare_word).parse_next(input)
}

fn keyword<'t>(keyword: &'static str) -> impl MosaicReads<'t, &'t str> {
    token(bare_word.verify(move |word: &str| word == keyword))
}

/// Parses a whole number of any integer type.
fn whole<T: std::str::FromStr>(input: &mut ParseInput) -> MosaicParsed<T> {
    token(bare_word.verify_map(|word| word.parse().ok())).parse_next(input)
}

fn quoted<'t>(input: &mut ParseInput<'t>) -> MosaicParsed<&'t str> {
    let end = cut_err('"').context("a string without escapes that ends on its line");
    delimited(token('"'), take_till(0.., ['"', '\n', '\\']), end).parse_next(input)
}

/// Parses a name after the sign `prefix`.
fn name<'t>(prefix: char) -> impl MosaicReads<'t, &'t str> {
    let name = take_while(1.., move |c| is_name(c) || prefix == '%' && c == '-');
    preceded(token(prefix), cut_err(name).context(format!("a name after {prefix}")))
}

/// Parses a symbol, `@name` or `@"name"`.
fn symbol<'t>(input: &mut ParseInput<'t>) -> MosaicParsed<&'t str> {
    let name = cut_err(alt((quoted, take_while(1.., is_name)))).context("a name after @");
    preceded(token('@'), name).parse_next(input)
}

/// Parses an attribute of a dialect, `#dialect.name<…>`.
fn opaque<'t>(input: &mut ParseInput<'t>) -> MosaicParsed<&'t str> {
    let parameters = ('<', take_till(0.., ['<', '>', '\n']), cut_err('>').context("the > that ends an attribute"));
    token((name('#'), opt(parameters)).take()).parse_next(input)
}

/// Parses an operand, `%name` or `%name#index`.
fn value(input: &mut ParseInput) -> MosaicParsed<ValueUse> {
    let index = preceded('#', cut_err(dec_uint).context("a result number after #"));
    let value = (name('%'), opt(index)).map(|(name, index)| ValueUse { name: name.into(), index: index.unwrap_or(0) });
    value.context("a value such as %0").parse_next(input)
}

fn deeper(input: &ParseInput, depth: usize) -> MosaicParsed<usize> {
    if depth < DEEPEST { Ok(depth + 1) } else { Err(wrong(input, format!("more than {DEEPEST} levels of nesting"))) }
}

fn operation<'t>(input: &mut ParseInput<'t>, depth: usize) -> MosaicParsed<MosaicOperation> {
    // Results, name, operands, properties, regions, attributes and types, in the order of the generic form.
    let results = definitions(input)?;
    space(input)?;
    let line = line_of(input.current_token_start(), input.state);
    let listed = move |input: &mut ParseInput<'t>| entries(input, depth);
    let region = move |input: &mut ParseInput<'t>| region(input, depth);
    let name = quoted.context("the quoted name of an operation").parse_next(input)?.to_string();
    let operands = after('(', until(')', value)).parse_next(input)?;
    let properties = opt(after('<', terminated(listed, mark('>')))).parse_next(input)?;
    let regions = opt(after('(', until(')', region))).parse_next(input)?.unwrap_or_default();
    let others = opt(listed).parse_next(input)?;
    // Properties and attributes have one name space here: MLIR moves names from one to the other.
    let attributes = dictionary(input, [properties, others].into_iter().flatten().flatten())?;
    let (operand_types, result_types) = after(':', function_type).parse_next(input)?;
    Ok(MosaicOperation { line, name, results, operands, attributes, regions, operand_types, result_types })
}

/// Parses definitions, `%name, %other:2 =`, if there are any.
fn definitions(input: &mut ParseInput) -> MosaicParsed<Vec<ValueDefinition>> {
    let count = opt(after(':', whole.context("a count of results")));
    let one = (name('%'), count).map(|(name, count)| ValueDefinition { name: name.into(), count: count.unwrap_or(1) });
    let all = terminated(separated(1.., one, mark(',')), cut_err(mark('=')));
    opt(all).map(Option::unwrap_or_default).parse_next(input)
}

fn region<'t>(input: &mut ParseInput<'t>, depth: usize) -> MosaicParsed<MosaicRegion> {
    // A region may begin with a label, which has the block's parameters.
    let depth = deeper(input, depth)?;
    let parameters = until(')', separated_pair(value, mark(':'), parse_type));
    let label = preceded(name('^'), cut_err(terminated(opt(after('(', parameters)), mark(':'))));
    let parameters = preceded(mark('{'), opt(label)).parse_next(input)?.flatten().unwrap_or_default();
    // A second label would begin another block.
    let one_block = token(not('^')).context("the region's end: only regions of one block are supported");
    let operation = preceded(one_block, move |input: &mut ParseInput<'t>| operation(input, depth));
    let (operations, _) = repeat_till(0.., cut_err(operation), mark('}')).parse_next(input)?;
    Ok(MosaicRegion { parameters, operations })
}

/// Parses a dictionary, `{key = value, …}`.
fn entries<'t>(input: &mut ParseInput<'t>, depth: usize) -> MosaicParsed<Vec<(&'t str, MosaicAttribute)>> {
    let key = alt((word, quoted)).context("an attribute's name");
    let value = move |input: &mut ParseInput<'t>| attribute(input, deeper(input, depth)?);
    after('{', until('}', separated_pair(key, mark('='), value))).parse_next(input)
}

fn dictionary<'t>(
    input: &ParseInput<'t>,
    entries: impl IntoIterator<Item = (&'t str, MosaicAttribute)>,
) -> MosaicParsed<BTreeMap<String, MosaicAttribute>> {
    let mut dictionary = BTreeMap::new();
    for (key, value) in entries {
        if dictionary.insert(key.to_string(), value).is_some() {
            return Err(wrong(input, format!("attribute {key} is given twice")));
        }
    }
    Ok(dictionary)
}

fn attribute<'t>(input: &mut ParseInput<'t>, depth: usize) -> MosaicParsed<MosaicAttribute> {
    let nested = move |input: &mut ParseInput<'t>| attribute(input, deeper(input, depth)?);
    let listed = move |input: &mut ParseInput<'t>| {
        let entries = entries(input, depth)?;
        dictionary(input, entries).map(MosaicAttribute::Dictionary)
    };
    let element = preceded(mark('<'), word.context("the type of an array's numbers"));
    let listed_numbers = after(':', until('>', whole.context("a whole number")));
    let numbers = alt((listed_numbers, mark('>').map(|_| Vec::new()))).context(": and numbers, or >");
    let array = preceded(keyword("array"), cut_err(preceded(element, numbers))).map(MosaicAttribute::Array);
    let every = delimited(mark('<'), word.context("one number for every element"), mark('>'));
    let splat = preceded(keyword("dense"), cut_err(separated_pair(every, mark(':'), parse_type)))
        .map(|(value, ty)| MosaicAttribute::Splat(value.into(), ty));
    // Alternatives are distinguished by their first character or word.
    let mut attribute = alt((
        symbol.map(|name| MosaicAttribute::Symbol(name.into())),
        quoted.map(|text| MosaicAttribute::Text(text.into())),
        opaque.map(|text| MosaicAttribute::Opaque(text.into())),
        after('[', until(']', nested)).map(MosaicAttribute::List),
        listed,
        function_type.map(|(parameters, results)| MosaicAttribute::FunctionType(parameters, results)),
        number,
        alt((array, splat)),
        alt((keyword("true"), keyword("false")))
            .map(|truth| MosaicAttribute::Scalar(truth.into(), MosaicType::scalar(ElementKind::I1))),
    ))
    .context("an attribute's value of a supported form");
    attribute.parse_next(input)
}

/// Parses a number, and its type if that is not i64.
fn number(input: &mut ParseInput) -> MosaicParsed<MosaicAttribute> {
    let number = bare_word.verify(|word: &str| word.starts_with(|c: char| c == '-' || c.is_ascii_digit()));
    let ty = opt(after(':', alt((keyword("i64").value(None), parse_type.map(Some)))));
    let (number, ty) = (token(number), ty).parse_next(input)?;
    if let Some(ty) = ty.flatten() {
        return Ok(MosaicAttribute::Scalar(number.into(), ty));
    }
    let whole = number.parse().map(MosaicAttribute::Whole);
    whole.map_err(|_| wrong(input, format!("expected a whole number, found {number}")))
}

/// Parses a function's type, `(types) -> type` or `(types) -> (types)`.
fn function_type(input: &mut ParseInput) -> MosaicParsed<(Vec<MosaicType>, Vec<MosaicType>)> {
    let parameters = after('(', until(')', parse_type));
    let arrow = cut_err(token("->")).context("-> and result types");
    let results = alt((after('(', until(')', parse_type)), parse_type.map(|ty| vec![ty])));
    separated_pair(parameters, arrow, cut_err(results).context("result types")).parse_next(input)
}

fn parse_type(input: &mut ParseInput) -> MosaicParsed<MosaicType> {
    match word.context("a type").parse_next(input)? {
        "vector" => after('<', terminated(shaped, mark('>'))).map(MosaicType::Data).parse_next(input),
        "memref" => {
            let vmem = "#tpu.memory_space<vmem>".value(MemorySpace::Vmem);
            let smem = "#tpu.memory_space<smem>".value(MemorySpace::Smem);
            let space = token(alt((vmem, smem))).context("#tpu.memory_space<vmem> or <smem>");
            let inside = terminated(separated_pair(shaped, mark(','), space), mark('>'));
            after('<', inside).map(|(shaped, space)| MosaicType::MemRef(shaped, space)).parse_next(input)
        }
        name => ElementKind::from_name(name)
            .map(MosaicType::scalar)
            .ok_or_else(|| wrong(input, format!("type {name} is not supported"))),
    }
}

/// Parses extents with an element type, `16x128xf32`.
fn shaped(input: &mut ParseInput) -> MosaicParsed<ArrayType> {
    let text = word.context("extents and an element type").parse_next(input)?;
    let mut shape = Vec::new();
    let mut rest = text;
    // Extents are before each `x`; the element type is the rest.
    while let Some((extent, after)) = rest.split_once('x').filter(|_| rest.starts_with(|c: char| c.is_ascii_digit())) {
        match extent.parse() {
            Ok(extent) if extent > 0 && shape.len() < MOST_DIMENSIONS => shape.push(extent),
            _ => {
                return Err(wrong(input, format!("expected positive extents, {MOST_DIMENSIONS} at most: {text}")));
            }
        }
        rest = after;
    }
    let kind = ElementKind::from_name(rest).filter(|_| !shape.is_empty());
    let kind = kind.ok_or_else(|| wrong(input, format!("expected extents and an element type: {text}")))?;
    ArrayType::new(kind, shape).ok_or_else(|| wrong(input, format!("{text} is larger than any array that is run")))
}
