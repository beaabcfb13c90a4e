//! [`Tokenizer`]: text to token ids and back.

use std::path::Path;

use super::TrainError;
use crate::checkpoint::{Vocabulary, parse_tokenizer, read_bounded};

/// The id that ends a completion, for the built-in tokenizer: the first after the bytes.
const END: u32 = 256;

/// One of the `tokenizers` crate, or one token a byte of UTF-8.
pub enum Tokenizer {
    /// Ids 0 to 255 are bytes, 256 ends a completion.
    Bytes,
    /// The tokenizer of a `tokenizer.json`.
    File {
        /// The tokenizer of the `tokenizers` crate.
        tokenizer: Box<tokenizers::Tokenizer>,
        /// The id that ends a completion.
        end: u32,
    },
}

impl Tokenizer {
    /// Reads `tokenizer.json`, whose token `end` ends a completion.
    ///
    /// # Errors
    /// [`TrainError`] where it cannot be read or has no such token.
    pub fn read(path: &Path, end: &str) -> Result<Self, TrainError> {
        let tokenizer = parse_tokenizer(&read_bounded(path)?).map_err(|error| TrainError::file(path, error))?;
        let Some(end) = tokenizer.token_to_id(end) else {
            return Err(TrainError::file(
                path,
                format!("`{end}`: no such token, expected the one that ends a completion"),
            ));
        };
        Ok(Tokenizer::File { tokenizer: Box::new(tokenizer), end })
    }

    /// Creates the tokenizer of a checkpoint in `path`, whose first end token ends a completion.
    pub(super) fn from_vocabulary(vocabulary: &Vocabulary, path: &Path) -> Result<Self, TrainError> {
        let Some(&end) = vocabulary.end.first() else {
            return Err(TrainError::file(path, "`eos_token_id`: got none, expected one".into()));
        };
        Ok(Tokenizer::File { tokenizer: Box::new(vocabulary.tokenizer.clone()), end })
    }

    /// Checks that a policy over `vocab` ids has every token.
    ///
    /// # Errors
    /// [`TrainError::Vocabulary`] where it has not.
    pub fn expect_within(&self, vocab: usize) -> Result<(), TrainError> {
        let needed = match self {
            Tokenizer::Bytes => END as usize + 1,
            // Ids may have holes: what counts is the largest.
            Tokenizer::File { tokenizer, .. } => {
                tokenizer.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1)
            }
        };
        if needed <= vocab { Ok(()) } else { Err(TrainError::Vocabulary { given: vocab, needed }) }
    }

    /// Returns the id that ends a completion.
    pub fn end(&self) -> u32 {
        match self {
            Tokenizer::Bytes => END,
            Tokenizer::File { end, .. } => *end,
        }
    }

    /// Encodes `text`, without added tokens.
    ///
    /// # Errors
    /// [`TrainError`] where the tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TrainError> {
        match self {
            Tokenizer::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Tokenizer::File { tokenizer, .. } => {
                let encoding =
                    tokenizer.encode(text, false).map_err(|error| TrainError::Tokenizer(error.to_string().into()))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// Decodes `ids`; invalid UTF-8 is replaced, and unknown ids are left out.
    ///
    /// # Errors
    /// [`TrainError`] where the tokenizer fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TrainError> {
        match self {
            Tokenizer::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Tokenizer::File { tokenizer, .. } => {
                tokenizer.decode(ids, true).map_err(|error| TrainError::Tokenizer(error.to_string().into()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokenizer_bytes_go_there_and_back() {
        let text = "Ann has 3 figs – #### 7";
        let ids = Tokenizer::Bytes.encode(text).unwrap();
        assert_eq!(ids.len(), text.len());
        assert_eq!(Tokenizer::Bytes.decode(&ids).unwrap(), text);
        assert_eq!(Tokenizer::Bytes.decode(&[0x41, END, 5000, 0x42]).unwrap(), "AB");
        assert!(Tokenizer::Bytes.expect_within(257).is_ok() && Tokenizer::Bytes.expect_within(256).is_err());
    }
}
