//! `ringmain top`.

use super::Global;
use super::exit::Failure;
use super::interrupt::Interrupt;
use super::output::{self, Align};
use super::stats;
use super::status::{HEADING, check_alive, condition, look, queue_row};
use super::units::{self, show_count, show_duration, show_size};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Alignment, Constraint, Layout};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState};
use ratatui::{DefaultTerminal, Frame};
use ringmain_broker::board::{Condition, Look};
use ringmain_broker::hub::QueueStatus;
use std::cmp::Reverse;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

/// How soon a signal is seen, and the shortest interval: without one, no key is
/// ever looked at.
const TICK: Duration = Duration::from_millis(100);

/// Watch the broker and its queues, full-screen
///
/// Reads the broker's status board in shared memory, and asks nobody: it shows
/// also a broker that is stuck or dead. Without a terminal it prints what it sees,
/// once.
///
/// Keys: q ends it, s sorts by the next column, the arrows scroll.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  ringmain top
  ringmain top --interval 250ms
  ringmain top | head -n 5")]
pub(super) struct Args {
    /// Time between two looks
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = units::duration)]
    interval: Duration,
}

pub(super) fn run(global: &Global, args: &Args) -> Result<(), Failure> {
    let first = look(global)?;
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        output::line(&stats::show(&first))?;
        return check_alive(&first);
    }
    let interrupt = Interrupt::catch()?;
    let mut terminal =
        ratatui::try_init().map_err(|e| Failure::io("cannot use the terminal", &e))?;
    let mut screen = Screen {
        look: Ok(first),
        order: Order::Name,
        table: TableState::default(),
    };
    let outcome = screen.run(global, args.interval.max(TICK), &mut terminal, &interrupt);
    let restored = ratatui::try_restore();
    outcome.map_err(|e| Failure::io("cannot use the terminal", &e))?;
    restored.map_err(|e| Failure::io("cannot restore the terminal", &e))?;
    interrupt.check()
}

/// What the queues are sorted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Name,
    Messages,
    Sends,
    Oldest,
}

impl Order {
    fn next(self) -> Order {
        match self {
            Order::Name => Order::Messages,
            Order::Messages => Order::Sends,
            Order::Sends => Order::Oldest,
            Order::Oldest => Order::Name,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Order::Name => "name",
            Order::Messages => "messages",
            Order::Sends => "sends/s",
            Order::Oldest => "oldest",
        }
    }

    /// Sorts what is by name.
    fn sort(self, queues: &mut [QueueStatus]) {
        match self {
            Order::Name => {}
            Order::Messages => queues.sort_by_key(|queue| Reverse(queue.messages)),
            Order::Sends => queues.sort_by_key(|queue| Reverse(queue.sends_per_s)),
            Order::Oldest => queues.sort_by_key(|queue| Reverse(queue.oldest_ms)),
        }
    }
}

/// What is on the screen.
struct Screen {
    /// The last look, or why there is none.
    look: Result<Look, String>,
    order: Order,
    table: TableState,
}

impl Screen {
    fn run(
        &mut self,
        global: &Global,
        interval: Duration,
        terminal: &mut DefaultTerminal,
        interrupt: &Interrupt,
    ) -> io::Result<()> {
        loop {
            terminal.draw(|frame| self.draw(frame))?;
            let next = Instant::now() + interval;
            while Instant::now() < next {
                if interrupt.came() {
                    return Ok(());
                }
                let left = next.saturating_duration_since(Instant::now());
                if !event::poll(left.min(TICK))? {
                    continue;
                }
                match event::read()? {
                    Event::Key(key) if ends(key) => return Ok(()),
                    Event::Key(key) if key.kind == KeyEventKind::Press => self.press(key.code),
                    _ => {}
                }
                terminal.draw(|frame| self.draw(frame))?;
            }
            self.look = look(global).map_err(|failure| failure.text().to_owned());
        }
    }

    fn press(&mut self, key: KeyCode) {
        let offset = self.table.offset_mut();
        let last = self
            .look
            .as_ref()
            .map_or(0, |look| look.status.per_queue.len().saturating_sub(1));
        match key {
            KeyCode::Char('s') => self.order = self.order.next(),
            KeyCode::Up => *offset = offset.saturating_sub(1),
            KeyCode::Down => *offset = (*offset + 1).min(last),
            KeyCode::PageUp => *offset = offset.saturating_sub(10),
            KeyCode::PageDown => *offset = (*offset + 10).min(last),
            KeyCode::Home => *offset = 0,
            KeyCode::End => *offset = last,
            _ => {}
        }
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let areas = Layout::vertical([
            Constraint::Length(5),
            Constraint::Min(1),
            Constraint::Length(1),
        ]);
        let [head, middle, foot] = areas.areas(frame.area());
        match &self.look {
            Ok(look) => {
                frame.render_widget(Paragraph::new(header(look)), head);
                let table = table(look, self.order);
                frame.render_stateful_widget(table, middle, &mut self.table);
            }
            Err(reason) => {
                frame.render_widget(Paragraph::new(reason.as_str().fg(Color::Red)), head);
            }
        }
        let keys = format!("q quit   s sort (by {})   ↑↓ scroll", self.order.name());
        frame.render_widget(Paragraph::new(keys.dim()), foot);
    }
}

fn ends(key: KeyEvent) -> bool {
    // The terminal is raw: Ctrl-C is a key like others.
    let ctrl_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    ctrl_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
}

fn header(look: &Look) -> Vec<Line<'static>> {
    let status = &look.status;
    let stats = &status.stats;
    let style = match look.condition {
        Condition::Serving => Style::new().fg(Color::Green),
        Condition::Draining => Style::new().fg(Color::Yellow),
        Condition::Stuck | Condition::Dead => Style::new().fg(Color::Red).bold(),
    };
    let disk = match stats.disk_full {
        true => ", DISK FULL".fg(Color::Red).bold(),
        false => Span::default(),
    };
    vec![
        Line::from(vec![
            format!("ringmain {}, process {}, ", status.version, status.pid).into(),
            Span::styled(condition(look), style),
            disk,
            format!(
                ", up {}",
                show_duration(Duration::from_millis(stats.uptime_ms))
            )
            .into(),
        ]),
        Line::from(format!(
            "{} sessions, {} queues, {} messages, {} leased, {} dead",
            show_count(stats.sessions),
            show_count(stats.queues),
            show_count(stats.messages),
            show_count(stats.leased),
            show_count(stats.dead),
        )),
        Line::from(format!(
            "{} sends/s, {} deliveries/s, {} acks/s; {} of {} sends were stored",
            show_count(status.sends_per_s),
            show_count(status.deliveries_per_s),
            show_count(status.acks_per_s),
            show_count(stats.stored),
            show_count(stats.sends),
        )),
        Line::from(format!(
            "memory {}, payload memory {}",
            show_size(status.cached_bytes),
            show_size(status.payload_bytes),
        )),
    ]
}

fn table(look: &Look, order: Order) -> Table<'static> {
    let mut queues = look.status.per_queue.clone();
    order.sort(&mut queues);
    let rows: Vec<Vec<String>> = queues.iter().map(queue_row).collect();
    let cell = |text: &str, column: usize| {
        let line = Line::from(text.to_owned());
        Cell::from(match HEADING[column].1 {
            Align::Left => line,
            Align::Right => line.alignment(Alignment::Right),
        })
    };
    let cells = |row: &[String]| -> Row<'static> {
        let cells = row.iter().enumerate();
        Row::new(
            cells
                .map(|(column, text)| cell(text, column))
                .collect::<Vec<_>>(),
        )
    };
    // The name takes what the numbers leave.
    let widths = (0..HEADING.len()).map(|column| {
        let longest = rows.iter().map(|row| row[column].chars().count()).max();
        let width = longest.unwrap_or(0).max(HEADING[column].0.len()) as u16;
        match column {
            0 => Constraint::Min(10),
            _ => Constraint::Length(width),
        }
    });
    let heading: Vec<String> = HEADING.iter().map(|(name, _)| (*name).to_owned()).collect();
    Table::new(rows.iter().map(|row| cells(row)), widths)
        .column_spacing(2)
        .header(cells(&heading).reversed())
}
