//! `assay report`: one page from the JSON of other commands.

use std::path::PathBuf;

use clap::Args;

use super::{CliError, Passed, command_line, output};
use crate::report::{Input, render};
use crate::text::{ShownPath, shown_lines};

#[derive(Args)]
pub(super) struct ReportCommand {
    /// Results that `--json` of replay, gradcheck, judge, bench, compile, mutants, peers, ab or check wrote
    #[arg(value_name = "INPUT.json", required = true)]
    inputs: Vec<PathBuf>,
    /// HTML page to write; `-` is stdout
    #[arg(short, long, value_name = "PAGE.html")]
    output: PathBuf,
    /// Do not print where it was written
    #[arg(short, long)]
    quiet: bool,
}

impl ReportCommand {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        let inputs = self.inputs.iter().map(|path| Input::read(path)).collect::<Result<Vec<_>, _>>()?;
        let page = render(&inputs, &command_line());
        output::write(&self.output, |out| out.write_all(shown_lines(&page).as_bytes()))?;
        if !self.quiet {
            super::print(&format!("{}: {} results, {} bytes\n", ShownPath(&self.output), inputs.len(), page.len()))?;
        }
        Ok(Passed::Yes)
    }
}
