//! `assay list`: the implementations, what they support, and why one cannot run here.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::Args;
use comfy_table::{ContentArrangement, Table, presets::UTF8_FULL_CONDENSED};
use serde::Serialize;

use super::document::{self, Marks};
use super::{CliError, Passed, PluginChoice, Printing};
#[cfg(feature = "pjrt")]
use crate::implementation::RunError;
use crate::implementation::{Implementation, ProblemFormat, Unsupported, Workload};
use crate::judge::summary::{COLUMNS, grouped, notes};
use crate::judge::variants::variants;
use crate::problem::{Dtype, HeadShape, Shape};
use crate::registry::{head_registry, registry};
#[cfg(feature = "pjrt")]
use crate::runtime::{Client, locate};
use crate::spec::LossSpec;
#[cfg(feature = "pjrt")]
use crate::text::ShownPath;

/// The shape that support is asked for: eight sequences of eight tokens, which eight devices can cut.
const SHAPE: Shape = Shape { batch: 8, tokens: 8, vocab: 151_936 };

/// The extents of the batch with an LM head that support is asked for.
const HEAD_SHAPE: HeadShape = HeadShape { batch: 8, tokens: 8, hidden: 896, vocab: 151_936 };

/// The lines that stand around the matrix in a document.
const MARKS: Marks = ["<!-- assay list --markdown -->", "<!-- end of matrix -->"];

#[derive(Args)]
pub(super) struct ListCommand {
    /// Show every choice of a spec against every implementation: yes, or the setting that is refused
    #[arg(long)]
    matrix: bool,
    /// Print the same as a Markdown table
    #[arg(long)]
    markdown: bool,
    /// Also put a summary between its marks in a document, such as docs/support.md, and the whole into data/support.csv next to it
    #[arg(long, value_name = "FILE.md", requires = "markdown")]
    into: Option<PathBuf>,
    #[command(flatten)]
    plugin: PluginChoice,
    #[command(flatten)]
    printing: Printing,
}

#[derive(Serialize)]
struct ListedImplementation {
    id: String,
    class: String,
    summary: String,
    available: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    why_not: Option<String>,
    dtypes: Vec<Dtype>,
    devices: Vec<usize>,
    /// Settings of a spec of which it does not compute every choice.
    unsupported: BTreeSet<&'static str>,
}

/// The fewest devices that an implementation takes.
fn fewest_devices<P: Workload>(implementation: &dyn Implementation<P>, shape: P::Shape) -> usize {
    // Implementations that cut a batch need as many devices as parts: the fewest that it takes tell what it supports at
    // all.
    let takes = |devices: &usize| implementation.supports(&LossSpec::default(), shape, Dtype::F32, *devices).is_ok();
    [1, 2, 4, 8].into_iter().find(takes).unwrap_or(1)
}

impl ListedImplementation {
    fn new<P: Workload>(implementation: &dyn Implementation<P>, shape: P::Shape) -> Self {
        let spec = LossSpec::default();
        let fewest = fewest_devices(implementation, shape);
        let supports = |spec: &LossSpec, dtype| implementation.supports(spec, shape, dtype, fewest);
        let dtypes: Vec<_> = Dtype::KERNEL.into_iter().filter(|&dtype| supports(&spec, dtype).is_ok()).collect();
        // Support of a choice is asked in a dtype that the implementation takes, so that it is not refused for its
        // dtype.
        let some_dtype = dtypes.first().copied().unwrap_or(Dtype::F32);
        let available = implementation.available();
        Self {
            id: implementation.id().into(),
            class: implementation.class().into(),
            summary: implementation.summary().into(),
            available: available.is_ok(),
            why_not: available.err().map(|why| why.reason),
            devices: implementation.device_counts(),
            unsupported: variants()
                .iter()
                .filter_map(|variant| supports(&variant.spec, some_dtype).err())
                .map(|why| why.field)
                .collect(),
            dtypes,
        }
    }
}

impl ListCommand {
    pub(super) fn run(&self) -> Result<Passed, CliError> {
        if self.matrix || self.markdown {
            return self.print_matrix();
        }
        let mut listed: Vec<ListedImplementation> = registry(self.plugin.path())
            .iter()
            .map(|implementation| ListedImplementation::new(&**implementation, SHAPE))
            .collect();
        listed.extend(
            head_registry(self.plugin.path()).iter().map(|head| ListedImplementation::new(&**head, HEAD_SHAPE)),
        );
        self.printing.finish_list(&text(&listed, devices(self.plugin.path())), &listed)?;
        self.expect_plugin()
    }

    /// Fails if there is a plugin that does not work: a table, or with `-q` nothing, would look as if none were there.
    #[cfg(feature = "pjrt")]
    fn expect_plugin(&self) -> Result<Passed, CliError> {
        if let Ok(path) = locate(self.plugin.path()) {
            Client::shared(&path).map_err(RunError::from)?;
        }
        Ok(Passed::Yes)
    }

    #[cfg(not(feature = "pjrt"))]
    fn expect_plugin(&self) -> Result<Passed, CliError> {
        self.plugin.checked_path()?;
        Ok(Passed::Yes)
    }

    fn print_matrix(&self) -> Result<Passed, CliError> {
        let matrix = Matrix::ask(&registry(self.plugin.path()));
        let text = if self.markdown { matrix.markdown() } else { format!("{}\n", matrix.table()) };
        if let Some(path) = &self.into {
            document::put_with_data(path, MARKS, "support", &matrix.markdown(), &matrix.summary())?;
        }
        self.printing.finish_list(&text, &matrix.rows)?;
        self.expect_plugin()
    }
}

/// Returns the plugin's devices and the plugin, one line each; empty without a plugin, as the implementations then give
/// the reason.
#[cfg(feature = "pjrt")]
fn devices(plugin: Option<&Path>) -> Vec<(&'static str, String)> {
    let Some(client) = locate(plugin).ok().and_then(|path| Client::shared(&path).ok()) else { return vec![] };
    let (major, minor) = client.plugin().version();
    let version = client.platform_version().split_whitespace().collect::<Vec<_>>().join(" ");
    let path = ShownPath(&client.plugin().path());
    vec![
        ("devices", format!("{} of {}, platform {}", client.device_count(), client.device_kind(), client.platform())),
        ("plugin", format!("{path} (C API {major}.{minor}): {version}")),
    ]
}

#[cfg(not(feature = "pjrt"))]
fn devices(_: Option<&Path>) -> Vec<(&'static str, String)> {
    vec![("plugin", crate::registry::LACKS_PLUGINS.into())]
}

/// A table, and below it the plugin's devices and what several implementations share: why they cannot run here, and the
/// options they refuse.
fn text(listed: &[ListedImplementation], devices: Vec<(&'static str, String)>) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic).set_width(COLUMNS);
    table.set_header(["impl", "runs\nhere", "dtypes", "devices", "what it is"]);
    for entry in listed {
        table.add_row([
            entry.id.clone(),
            if entry.available { "yes".into() } else { "no".into() },
            join(&entry.dtypes, ","),
            if entry.devices.is_empty() { "–".into() } else { join(&entry.devices, ",") },
            entry.summary.clone(),
        ]);
    }
    let ids = |entries: &[&ListedImplementation]| join(entries.iter().map(|entry| &entry.id), ", ");
    // Implementations are grouped by what they share, and one line names the group: most cannot run for one reason.
    let reasons = grouped(listed, |entry| &entry.why_not).into_iter().filter_map(|entries| {
        let why = entries[0].why_not.as_ref()?;
        Some(("not here", format!("{}: {why}", ids(&entries))))
    });
    let refused = grouped(listed, |entry| &entry.unsupported).into_iter().map(|entries| {
        let options = &entries[0].unsupported;
        let options = if options.is_empty() { "nothing".into() } else { join(options, ", ") };
        ("refused", format!("by {}: {options}", ids(&entries)))
    });
    format!("{table}\n{}", notes(devices.into_iter().chain(reasons).chain(refused)))
}

fn join(items: impl IntoIterator<Item = impl ToString>, between: &str) -> String {
    items.into_iter().map(|item| item.to_string()).collect::<Vec<_>>().join(between)
}

/// Every named choice of a spec against every implementation.
struct Matrix {
    rows: Vec<SupportRow>,
    /// Implementations of one kind that support the same, under one heading.
    columns: Vec<Vec<String>>,
}

#[derive(Serialize)]
struct SupportRow {
    field: &'static str,
    choice: &'static str,
    /// The support by implementation, including the reference.
    support: BTreeMap<String, SupportCell>,
}

#[derive(Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum SupportCell {
    Yes,
    No {
        /// The setting that is refused.
        refused: &'static str,
        /// The value that would be supported.
        supported: String,
    },
}

impl SupportCell {
    fn text(&self) -> &str {
        match self {
            SupportCell::Yes => "yes",
            SupportCell::No { refused, .. } => refused,
        }
    }
}

/// The id of the reference, which every other implementation is judged by.
const REFERENCE: &str = "reference";

impl Matrix {
    fn ask(implementations: &[std::sync::Arc<dyn Implementation>]) -> Self {
        let cell = |supported: Result<(), Unsupported>| match supported {
            Ok(()) => SupportCell::Yes,
            Err(why) => SupportCell::No { refused: why.field, supported: why.supported },
        };
        let row = |field, choice, of: &dyn Fn(&dyn Implementation) -> Result<(), Unsupported>| {
            let mut support: BTreeMap<String, SupportCell> =
                implementations.iter().map(|each| (each.id().to_string(), cell(of(&**each)))).collect();
            support.insert(REFERENCE.into(), SupportCell::Yes);
            SupportRow { field, choice, support }
        };
        let mut rows: Vec<SupportRow> = variants()
            .into_iter()
            .map(|variant| {
                row(variant.field, variant.choice, &|implementation| {
                    implementation.supports(&variant.spec, SHAPE, Dtype::F32, fewest_devices(implementation, SHAPE))
                })
            })
            .collect();
        // No choice of a spec's, but of how a batch lies.
        rows.push(row("sequences", "packed", &|implementation| {
            let given = ProblemFormat { shape: SHAPE, dtype: Dtype::F32, form: (), packed: Some(SHAPE.batch) };
            implementation.supports_given(&LossSpec::default(), given, fewest_devices(implementation, SHAPE))
        }));
        // Neighbours of one class that support the same share a column, or the table would be too wide to read.
        let mut columns = vec![vec![REFERENCE.to_string()]];
        for (i, implementation) in implementations.iter().enumerate() {
            let id = implementation.id();
            let with_last = i > 0 && implementations[i - 1].class() == implementation.class() && {
                let last = implementations[i - 1].id();
                rows.iter().all(|row| row.support[last] == row.support[id])
            };
            match columns.last_mut() {
                Some(column) if with_last => column.push(id.into()),
                _ => columns.push(vec![id.into()]),
            }
        }
        Self { rows, columns }
    }

    /// The cells of a row, by column.
    fn cells<'m>(&'m self, row: &'m SupportRow) -> impl Iterator<Item = &'m SupportCell> {
        self.columns.iter().map(|ids| &row.support[&ids[0]])
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        let heading = |ids: &Vec<String>| ids.join("\n");
        table.set_header(["field".into(), "choice".into()].into_iter().chain(self.columns.iter().map(heading)));
        for row in &self.rows {
            let names = [row.field, row.choice].into_iter();
            table.add_row(names.chain(self.cells(row).map(SupportCell::text)));
        }
        table
    }

    /// The choices by who computes them, those of most implementations first.
    fn summary(&self) -> String {
        let refusers = |row: &SupportRow| -> Vec<&str> {
            let refuses = |ids: &&Vec<String>| row.support[&ids[0]] != SupportCell::Yes;
            self.columns.iter().filter(refuses).flatten().map(String::as_str).collect()
        };
        let mut groups = grouped(&self.rows, refusers);
        groups.sort_by_key(|rows| refusers(rows[0]).len());
        let mut text = String::from("| computed by | choices | |\n|---|--:|---|\n");
        for rows in groups {
            let (refused, all) = (refusers(rows[0]), self.columns.iter().map(Vec::len).sum::<usize>());
            let code = |ids: &[&str]| join(ids.iter().map(|id| format!("`{id}`")), ", ");
            let who = match refused.len() {
                0 => "all".into(),
                n if n + 1 == all => "the reference alone".into(),
                n if 2 * n > all => {
                    let ids = self.columns.iter().flatten().map(String::as_str);
                    code(&ids.filter(|id| !refused.contains(id)).collect::<Vec<_>>())
                }
                _ => format!("all but {}", code(&refused)),
            };
            let names = join(rows.iter().map(|row| format!("{}: {}", row.field, row.choice)), "; ");
            let names = if refused.is_empty() { "all others" } else { &names };
            let _ = writeln!(text, "| {who} | {} | {names} |", rows.len());
        }
        text
    }

    fn markdown(&self) -> String {
        let mut text = String::from("| field | choice |");
        for ids in &self.columns {
            let _ = write!(text, " {} |", ids.join("<br>"));
        }
        text += "\n|---|---|";
        text += &"---|".repeat(self.columns.len());
        text += "\n";
        for (i, row) in self.rows.iter().enumerate() {
            // A field is written once, on the first of its choices.
            let repeated = i > 0 && self.rows[i - 1].field == row.field;
            let _ = write!(text, "| {} | {} |", if repeated { "" } else { row.field }, row.choice);
            for cell in self.cells(row) {
                let _ = match cell {
                    SupportCell::Yes => write!(text, " yes |"),
                    SupportCell::No { refused, .. } => write!(text, " no: `{refused}` |"),
                };
            }
            text += "\n";
        }
        text
    }
}
