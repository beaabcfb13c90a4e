//! Generic-form MLIR text into a tree of operations, each with its line. What they mean is [`super::check`]'s matter.

use std::collections::BTreeMap;

use super::InterpretError;
use super::value::{Kind, Shaped, Space, Type};

/// No module is longer.
const LONGEST_TEXT: usize = 16 << 20;
/// Regions within regions, and attributes within attributes.
const DEEPEST: usize = 32;
/// Extents of a vector or memref.
const MOST_DIMENSIONS: usize = 8;

/// An operation as it is written.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) line: usize,
    pub(super) name: String,
    pub(super) results: Vec<Definition>,
    pub(super) operands: Vec<Use>,
    pub(super) attributes: BTreeMap<String, Attribute>,
    pub(super) regions: Vec<Region>,
    pub(super) operand_types: Vec<Type>,
    pub(super) result_types: Vec<Type>,
}

/// `%name` or `%name:count` on the left of an operation.
#[derive(Debug)]
pub(super) struct Definition {
    pub(super) name: String,
    pub(super) count: usize,
}

/// `%name` or `%name#index` as an operand.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Use {
    pub(super) name: String,
    pub(super) index: usize,
}

/// A region of one block, or of none.
#[derive(Debug, Default)]
pub(super) struct Region {
    pub(super) parameters: Vec<(Use, Type)>,
    pub(super) operations: Vec<Operation>,
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Attribute {
    /// A whole number without a type, or of the one that MLIR gives it then: i64.
    Whole(i64),
    /// A number of another type as it is spelt, or `true` or `false`.
    Scalar(String, Type),
    /// `dense<SCALAR> : type`
    Splat(String, Type),
    /// `array<type: numbers>`
    Array(Vec<i64>),
    List(Vec<Attribute>),
    Dictionary(BTreeMap<String, Attribute>),
    /// `@name`
    Symbol(String),
    Text(String),
    /// `#dialect.name<…>`, as written.
    Opaque(String),
    FunctionType(Vec<Type>, Vec<Type>),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Token<'a> {
    /// `%name`, `%name#index`
    Value(&'a str),
    Symbol(&'a str),
    Label(&'a str),
    Text(&'a str),
    Opaque(&'a str),
    /// A keyword, a type, a number or extents: `array`, `vector`, `f32`, `-1.0e+00`, `16x128xf32`.
    Word(&'a str),
    Mark(char),
    Arrow,
    End,
}

impl Token<'_> {
    fn described(self) -> String {
        match self {
            Token::Value(text) => format!("%{text}"),
            Token::Symbol(text) => format!("@{text}"),
            Token::Label(text) => format!("^{text}"),
            Token::Text(text) => format!("{text:?}"),
            Token::Opaque(text) | Token::Word(text) => text.to_string(),
            Token::Mark(mark) => mark.to_string(),
            Token::Arrow => "->".to_string(),
            Token::End => "the end of the text".to_string(),
        }
    }
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '$')
}

struct Parser<'a> {
    text: &'a str,
    /// Where the token after `token` begins.
    rest: usize,
    token: Token<'a>,
    /// The line of `token`, and that of `rest`.
    line: usize,
    rest_line: usize,
}

type Parsed<T> = Result<T, InterpretError>;

/// The one operation that `text` holds.
pub(super) fn parse(text: &str) -> Parsed<Operation> {
    if text.len() > LONGEST_TEXT {
        let problem = format!("{} bytes of text; the longest module that is read has {LONGEST_TEXT}", text.len());
        return Err(InterpretError::Text { line: 1, problem });
    }
    let mut parser = Parser { text, rest: 0, token: Token::End, line: 1, rest_line: 1 };
    parser.advance()?;
    let module = parser.operation(0)?;
    match parser.token {
        Token::End => Ok(module),
        _ => Err(parser.expected("the end of the text after the module")),
    }
}

impl<'a> Parser<'a> {
    fn error(&self, problem: String) -> InterpretError {
        InterpretError::Text { line: self.line, problem }
    }

    fn expected(&self, what: &str) -> InterpretError {
        self.error(format!("expected {what}, found {}", self.token.described()))
    }

    /// Steps over the longest prefix of the rest whose characters are all `wanted`.
    fn take_while(&mut self, wanted: impl Fn(char) -> bool) -> &'a str {
        let rest = &self.text[self.rest..];
        let end = rest.find(|c| !wanted(c)).unwrap_or(rest.len());
        self.rest += end;
        &rest[..end]
    }

    fn skip_space(&mut self) {
        loop {
            let space = self.take_while(char::is_whitespace);
            self.rest_line += space.matches('\n').count();
            if !self.text[self.rest..].starts_with("//") {
                return;
            }
            self.take_while(|c| c != '\n');
        }
    }

    fn advance(&mut self) -> Parsed<()> {
        self.skip_space();
        self.line = self.rest_line;
        let rest = &self.text[self.rest..];
        let Some(first) = rest.chars().next() else {
            self.token = Token::End;
            return Ok(());
        };
        self.token = match first {
            '-' if rest.starts_with("->") => {
                self.rest += 2;
                Token::Arrow
            }
            _ if first == '-' || is_name(first) => Token::Word(self.word()),
            '"' => Token::Text(self.quoted()?),
            '%' | '@' | '^' | '#' => {
                self.rest += 1;
                self.prefixed(first)?
            }
            '(' | ')' | '{' | '}' | '[' | ']' | '<' | '>' | ',' | ':' | '=' => {
                self.rest += 1;
                Token::Mark(first)
            }
            _ => return Err(self.error(format!("a character that means nothing here: {first:?}"))),
        };
        Ok(())
    }

    /// Letters and digits, with the sign before a number and the one in its exponent.
    fn word(&mut self) -> &'a str {
        let start = self.rest;
        self.rest += usize::from(self.text[start..].starts_with('-'));
        let numeric = self.text[self.rest..].starts_with(|c: char| c.is_ascii_digit());
        self.take_while(is_name);
        let so_far = &self.text[start..self.rest];
        let hex = so_far.trim_start_matches('-').starts_with("0x");
        if numeric && !hex && so_far.ends_with(['e', 'E']) && self.text[self.rest..].starts_with(['+', '-']) {
            self.rest += 1;
            self.take_while(|c| c.is_ascii_digit());
        }
        &self.text[start..self.rest]
    }

    fn quoted(&mut self) -> Parsed<&'a str> {
        self.rest += 1;
        let inside = self.take_while(|c| !matches!(c, '"' | '\n' | '\\'));
        if !self.text[self.rest..].starts_with('"') {
            return Err(self.error("expected a string without escapes that ends on its line".to_string()));
        }
        self.rest += 1;
        Ok(inside)
    }

    fn prefixed(&mut self, prefix: char) -> Parsed<Token<'a>> {
        let start = self.rest;
        let name = match prefix {
            '@' if self.text[start..].starts_with('"') => self.quoted()?,
            '%' => self.take_while(|c| is_name(c) || matches!(c, '-' | '#')),
            '#' => {
                self.take_while(is_name);
                self.opaque_parameters()?;
                &self.text[start - 1..self.rest]
            }
            _ => self.take_while(is_name),
        };
        if name.trim_start_matches('#').is_empty() {
            return Err(self.error(format!("expected a name after {prefix}")));
        }
        Ok(match prefix {
            '%' => Token::Value(name),
            '@' => Token::Symbol(name),
            '^' => Token::Label(name),
            _ => Token::Opaque(name),
        })
    }

    /// `<…>` with every `<` inside closed, if it follows.
    fn opaque_parameters(&mut self) -> Parsed<()> {
        let mut open = 0usize;
        for (i, c) in self.text[self.rest..].char_indices() {
            match c {
                '<' => open += 1,
                '>' if open > 0 => open -= 1,
                '\n' => break,
                _ => {}
            }
            if open == 0 {
                self.rest += if c == '>' { i + 1 } else { i };
                return Ok(());
            }
        }
        Err(self.error("expected the > that ends an attribute on its line".to_string()))
    }

    fn is(&self, mark: char) -> bool {
        self.token == Token::Mark(mark)
    }

    /// Steps over `mark` if it is next.
    fn accept(&mut self, mark: char) -> Parsed<bool> {
        let found = self.is(mark);
        if found {
            self.advance()?;
        }
        Ok(found)
    }

    fn expect(&mut self, mark: char) -> Parsed<()> {
        if self.accept(mark)? { Ok(()) } else { Err(self.expected(&mark.to_string())) }
    }

    fn expect_word(&mut self, what: &str) -> Parsed<&'a str> {
        match self.token {
            Token::Word(word) => {
                self.advance()?;
                Ok(word)
            }
            _ => Err(self.expected(what)),
        }
    }

    /// Items with commas between them, up to `close`, which is stepped over.
    fn until<T>(&mut self, close: char, mut item: impl FnMut(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
        let mut items = Vec::new();
        if self.accept(close)? {
            return Ok(items);
        }
        loop {
            items.push(item(self)?);
            if self.accept(close)? {
                return Ok(items);
            }
            if !self.accept(',')? {
                return Err(self.expected(&format!(", or {close}")));
            }
        }
    }

    fn deeper(&self, depth: usize) -> Parsed<usize> {
        if depth < DEEPEST { Ok(depth + 1) } else { Err(self.error(format!("more than {DEEPEST} levels of nesting"))) }
    }

    fn operation(&mut self, depth: usize) -> Parsed<Operation> {
        let results = self.definitions()?;
        let line = self.line;
        let Token::Text(name) = self.token else {
            return Err(self.expected("the quoted name of an operation"));
        };
        self.advance()?;
        self.expect('(')?;
        let operands = self.until(')', Self::value)?;
        let mut attributes = BTreeMap::new();
        if self.accept('<')? {
            self.expect('{')?;
            self.dictionary(&mut attributes, depth)?;
            self.expect('>')?;
        }
        let mut regions = Vec::new();
        if self.accept('(')? {
            let deeper = self.deeper(depth)?;
            regions = self.until(')', |parser| parser.region(deeper))?;
        }
        if self.accept('{')? {
            self.dictionary(&mut attributes, depth)?;
        }
        self.expect(':')?;
        let (operand_types, result_types) = self.function_type()?;
        let name = name.to_string();
        Ok(Operation { line, name, results, operands, attributes, regions, operand_types, result_types })
    }

    fn definitions(&mut self) -> Parsed<Vec<Definition>> {
        let mut results = Vec::new();
        while let Token::Value(name) = self.token {
            let name = name.to_string();
            if name.contains('#') {
                return Err(self.expected("a result's name, without #"));
            }
            self.advance()?;
            let count = if self.accept(':')? { self.number("a count of results")? } else { 1 };
            results.push(Definition { name, count });
            if !self.accept(',')? {
                self.expect('=')?;
                break;
            }
        }
        Ok(results)
    }

    fn number<T: std::str::FromStr>(&mut self, what: &str) -> Parsed<T> {
        let number = match self.token {
            Token::Word(word) => word.parse().ok(),
            _ => None,
        };
        let number = number.ok_or_else(|| self.expected(what))?;
        self.advance()?;
        Ok(number)
    }

    fn value(&mut self) -> Parsed<Use> {
        let Token::Value(text) = self.token else {
            return Err(self.expected("a value such as %0"));
        };
        let (name, index) = match text.split_once('#') {
            Some((name, index)) => (name, index.parse().map_err(|_| self.expected("a result number after #"))?),
            None => (text, 0),
        };
        self.advance()?;
        Ok(Use { name: name.to_string(), index })
    }

    fn region(&mut self, depth: usize) -> Parsed<Region> {
        self.expect('{')?;
        let mut region = Region::default();
        if let Token::Label(_) = self.token {
            self.advance()?;
            if self.accept('(')? {
                region.parameters = self.until(')', |parser| {
                    let name = parser.value()?;
                    parser.expect(':')?;
                    Ok((name, parser.parse_type()?))
                })?;
            }
            self.expect(':')?;
        }
        while !self.accept('}')? {
            if let Token::Label(_) = self.token {
                return Err(self.expected("the region's end: only regions of one block are supported"));
            }
            region.operations.push(self.operation(depth)?);
        }
        Ok(region)
    }

    /// The entries of `{…}`, whose `{` was stepped over.
    fn dictionary(&mut self, entries: &mut BTreeMap<String, Attribute>, depth: usize) -> Parsed<()> {
        let depth = self.deeper(depth)?;
        let listed = self.until('}', |parser| {
            let (Token::Word(key) | Token::Text(key)) = parser.token else {
                return Err(parser.expected("an attribute's name"));
            };
            parser.advance()?;
            parser.expect('=')?;
            Ok((key.to_string(), parser.attribute(depth)?))
        })?;
        for (key, value) in listed {
            if entries.contains_key(&key) {
                return Err(self.error(format!("attribute {key} is given twice")));
            }
            entries.insert(key, value);
        }
        Ok(())
    }

    fn attribute(&mut self, depth: usize) -> Parsed<Attribute> {
        let token = self.token;
        match token {
            Token::Symbol(name) => self.advance().map(|()| Attribute::Symbol(name.to_string())),
            Token::Text(text) => self.advance().map(|()| Attribute::Text(text.to_string())),
            Token::Opaque(text) => self.advance().map(|()| Attribute::Opaque(text.to_string())),
            Token::Mark('[') => {
                self.advance()?;
                let depth = self.deeper(depth)?;
                Ok(Attribute::List(self.until(']', |parser| parser.attribute(depth))?))
            }
            Token::Mark('{') => {
                self.advance()?;
                let mut entries = BTreeMap::new();
                self.dictionary(&mut entries, depth)?;
                Ok(Attribute::Dictionary(entries))
            }
            Token::Mark('(') => {
                let (parameters, results) = self.function_type()?;
                Ok(Attribute::FunctionType(parameters, results))
            }
            Token::Word("array") => {
                self.advance()?;
                self.expect('<')?;
                self.expect_word("the type of an array's numbers")?;
                let numbers = if self.accept(':')? {
                    self.until('>', |parser| parser.number("a whole number"))?
                } else {
                    self.expect('>').map(|()| Vec::new())?
                };
                Ok(Attribute::Array(numbers))
            }
            Token::Word("dense") => {
                self.advance()?;
                self.expect('<')?;
                let value = self.expect_word("one number for every element")?;
                self.expect('>')?;
                self.expect(':')?;
                Ok(Attribute::Splat(value.to_string(), self.parse_type()?))
            }
            Token::Word(word @ ("true" | "false")) => {
                self.advance()?;
                Ok(Attribute::Scalar(word.to_string(), Type::scalar(Kind::I1)))
            }
            Token::Word(word) if word.starts_with(|c: char| c == '-' || c.is_ascii_digit()) => {
                self.advance()?;
                let typed = self.accept(':')?;
                if typed && self.token != Token::Word("i64") {
                    return Ok(Attribute::Scalar(word.to_string(), self.parse_type()?));
                }
                let whole = word.parse().map_err(|_| self.error(format!("expected a whole number, found {word}")))?;
                if typed {
                    self.advance()?;
                }
                Ok(Attribute::Whole(whole))
            }
            _ => Err(self.expected("an attribute's value of a supported form")),
        }
    }

    /// `(types) -> type` or `(types) -> (types)`
    fn function_type(&mut self) -> Parsed<(Vec<Type>, Vec<Type>)> {
        self.expect('(')?;
        let parameters = self.until(')', Self::parse_type)?;
        if self.token != Token::Arrow {
            return Err(self.expected("-> and result types"));
        }
        self.advance()?;
        let results = if self.accept('(')? { self.until(')', Self::parse_type)? } else { vec![self.parse_type()?] };
        Ok((parameters, results))
    }

    fn parse_type(&mut self) -> Parsed<Type> {
        match self.expect_word("a type")? {
            "vector" => {
                self.expect('<')?;
                let shaped = self.shaped()?;
                self.expect('>')?;
                Ok(Type::Data(shaped))
            }
            "memref" => {
                self.expect('<')?;
                let shaped = self.shaped()?;
                self.expect(',')?;
                let space = match self.token {
                    Token::Opaque("#tpu.memory_space<vmem>") => Space::Vmem,
                    Token::Opaque("#tpu.memory_space<smem>") => Space::Smem,
                    _ => return Err(self.expected("#tpu.memory_space<vmem> or <smem>")),
                };
                self.advance()?;
                self.expect('>')?;
                Ok(Type::MemRef(shaped, space))
            }
            name => Kind::from_name(name)
                .map(Type::scalar)
                .ok_or_else(|| self.error(format!("type {name} is not supported"))),
        }
    }

    /// `16x128xf32`
    fn shaped(&mut self) -> Parsed<Shaped> {
        let text = self.expect_word("extents and an element type")?;
        let mut shape = Vec::new();
        let mut rest = text;
        while let Some((extent, after)) =
            rest.split_once('x').filter(|_| rest.starts_with(|c: char| c.is_ascii_digit()))
        {
            match extent.parse() {
                Ok(extent) if extent > 0 && shape.len() < MOST_DIMENSIONS => shape.push(extent),
                _ => return Err(self.error(format!("expected positive extents, {MOST_DIMENSIONS} at most: {text}"))),
            }
            rest = after;
        }
        let kind = Kind::from_name(rest).filter(|_| !shape.is_empty());
        let kind = kind.ok_or_else(|| self.error(format!("expected extents and an element type: {text}")))?;
        Shaped::new(kind, shape).ok_or_else(|| self.error(format!("{text} is larger than any array that is run")))
    }
}
