//! RocksDB: how it is set up, opened, written and read. What the rows mean is
//! not known here.

use super::super::block::PART_BYTES;
use super::super::parts::Identity;
use super::super::{QueueNumber, StoreError};
use super::{FORMAT, keys, mark};
use crate::crash::crash_point;
use rocksdb::{
    BlockBasedOptions, Cache, ColumnFamily, ColumnFamilyDescriptor, DB, DBCompressionType,
    DBRawIteratorWithThreadMode, DBRecoveryMode, ErrorKind, FlushOptions, IteratorMode, LogLevel,
    Options, ReadOptions, SnapshotWithThreadMode, WriteBatch, properties,
};
use std::ops::Deref;
use std::path::{Path, PathBuf};

/// The default column family, for all small rows that are not marks.
const ROWS: &str = "default";
const BLOCKS: &str = "blocks";
const MARKS: &str = "marks";
const PARTS: &str = "parts";
const FAMILIES: [&str; 4] = [ROWS, BLOCKS, MARKS, PARTS];

/// Blocks are collected in memory, beside the log, up to this many bytes, and
/// then written out as a table. Commits wait once so many are unwritten.
const BLOCKS_MEMORY: usize = 64 << 20;
const BLOCKS_MEMORIES_MAX: i32 = 4;
const MARKS_MEMORY: usize = 16 << 20;
const ROWS_MEMORY: usize = 4 << 20;
/// Parts go to the disk soon: nothing is won by keeping them together.
const PARTS_MEMORY: usize = 16 << 20;
const PARTS_MEMORIES_MAX: i32 = 3;
/// A file of parts is given back when the last of them is deleted, so it holds
/// few.
const PARTS_FILE_BYTES: u64 = 4 * PART_BYTES as u64;
/// Shorter parts, the ends of payloads, lie beside their keys.
const PARTS_BLOB_BYTES_MIN: u64 = 4 << 10;
/// The log is read whole when the store is opened, so it bounds how long that
/// takes.
const LOG_BYTES_MAX: u64 = 256 << 20;
const READ_CACHE_BYTES: usize = 32 << 20;
const OPEN_FILES_MAX: i32 = 256;
/// Values from here on lie in files of their own, and are not copied by
/// compaction.
const BLOB_BYTES_MIN: u64 = 1 << 20;

/// One state of the database, that later commits don't change.
pub(super) type Snapshot<'a> = SnapshotWithThreadMode<'a, DB>;
/// Goes over the blocks of one queue by key.
pub(super) type Blocks<'a> = DBRawIteratorWithThreadMode<'a, DB>;

/// Key and value.
pub(super) type Row = (Box<[u8]>, Box<[u8]>);

/// An open database.
pub(super) struct Engine {
    db: DB,
    path: PathBuf,
}

/// Looks at a database without changing anything in its folder, and refuses one
/// that this version cannot read, or that has lost synced rounds.
pub(super) fn examine(path: &Path, mark: u64) -> Result<(), StoreError> {
    let exists = path.join("CURRENT").try_exists();
    if !exists.map_err(|error| super::folder::file_error(path, &error))? {
        return mark::check(mark, 0);
    }
    let options = database_options();
    // Only the small rows: the log's blocks are checked, but not kept.
    let rows = [ColumnFamilyDescriptor::new(ROWS, rows_options())];
    let db = DB::open_cf_descriptors_read_only(&options, path, rows, false)
        .map_err(|error| rocks_error(path, &error))?;
    let engine = Engine {
        db,
        path: path.to_owned(),
    };
    let format = engine.number_row(keys::META_FORMAT, keys::decode_u32)?;
    let round = engine.number_row(keys::META_ROUND, keys::decode_u64)?;
    match format {
        Some(found) if found > FORMAT => {
            return Err(StoreError::Version {
                found,
                known: FORMAT,
            });
        }
        Some(FORMAT) => {}
        // Its making was interrupted; it is made again.
        None if round.is_none() => {}
        _ => return Err(engine.damaged("the format version")),
    }
    mark::check(mark, round.unwrap_or(0))
}

impl Engine {
    /// Opens the database for writing, and makes it if there is none. RocksDB
    /// replays its log, writes what it gave into tables and syncs them.
    pub(super) fn open(path: PathBuf) -> Result<Engine, StoreError> {
        let cache = Cache::new_lru_cache(READ_CACHE_BYTES);
        let families = [
            ColumnFamilyDescriptor::new(ROWS, cached(rows_options(), &cache)),
            ColumnFamilyDescriptor::new(BLOCKS, cached(blocks_options(), &cache)),
            ColumnFamilyDescriptor::new(MARKS, cached(marks_options(), &cache)),
            ColumnFamilyDescriptor::new(PARTS, cached(parts_options(), &cache)),
        ];
        let db = DB::open_cf_descriptors(&database_options(), &path, families)
            .map_err(|error| rocks_error(&path, &error))?;
        let engine = Engine { db, path };
        if engine
            .number_row(keys::META_FORMAT, keys::decode_u32)?
            .is_none()
        {
            let mut changes = engine.changes(0);
            changes.put_row(keys::META_FORMAT, &FORMAT.to_le_bytes());
            crash_point("write the store's format");
            engine.write(changes)?;
        }
        for family in FAMILIES {
            crash_point("write out what the log gave");
            engine.named(engine.db.flush_cf(engine.family(family)))?;
        }
        crash_point("sync what the log gave");
        engine.sync()?;
        Ok(engine)
    }

    /// An empty set of changes with room for this many bytes of blocks.
    pub(super) fn changes(&self, block_bytes: usize) -> Changes<'_> {
        Changes {
            engine: self,
            batch: WriteBatch::with_capacity_bytes(block_bytes + 4096),
        }
    }

    /// Makes all the changes or none. They are in the kernel's hands afterwards.
    pub(super) fn write(&self, changes: Changes<'_>) -> Result<(), StoreError> {
        self.named(self.db.write(changes.batch))
    }

    /// Syncs all that was written before the call.
    pub(super) fn sync(&self) -> Result<(), StoreError> {
        self.named(self.db.flush_wal(true))
    }

    /// Starts writing out the blocks, and above all the tombstones, in memory.
    pub(super) fn flush_blocks(&self) -> Result<(), StoreError> {
        self.flush(BLOCKS)
    }

    /// The same for the parts.
    pub(super) fn flush_parts(&self) -> Result<(), StoreError> {
        self.flush(PARTS)
    }

    fn flush(&self, family: &str) -> Result<(), StoreError> {
        let mut options = FlushOptions::default();
        options.set_wait(false);
        self.named(self.db.flush_cf_opt(self.family(family), &options))
    }

    /// Gives back the files that hold nothing but blocks of a deleted queue,
    /// rather than wait for compaction to come upon them.
    pub(super) fn drop_files(&self, queue: QueueNumber) {
        let (start, end) = (keys::block_key(queue, 0), keys::blocks_end(queue));
        let blocks = self.family(BLOCKS);
        crash_point("drop the files of a deleted queue");
        let dropped = self
            .db
            .delete_file_in_range_cf(blocks, &start[..], &end[..]);
        if let Err(error) = dropped {
            tracing::warn!(queue, %error, "a deleted queue's files stay for a while");
        }
    }

    /// Bytes that were written to the log only.
    pub(super) fn memory_bytes(&self) -> Result<u64, StoreError> {
        let mut bytes = 0;
        for family in FAMILIES {
            let family = self.family(family);
            let name = properties::CUR_SIZE_ALL_MEM_TABLES;
            bytes += self
                .named(self.db.property_int_value_cf(family, name))?
                .unwrap_or(0);
        }
        Ok(bytes)
    }

    pub(super) fn snapshot(&self) -> Snapshot<'_> {
        self.db.snapshot()
    }

    /// Goes over a queue's blocks that begin before `end`.
    pub(super) fn blocks<'a>(
        &'a self,
        snapshot: Option<&'a Snapshot<'a>>,
        queue: QueueNumber,
        end: u64,
    ) -> Blocks<'a> {
        let mut options = reading(snapshot);
        options.set_iterate_lower_bound(keys::block_key(queue, 0));
        options.set_iterate_upper_bound(keys::block_key(queue, end));
        self.db.raw_iterator_cf_opt(self.family(BLOCKS), options)
    }

    /// Whether the blocks came to their end, and not to an error.
    pub(super) fn iterated(&self, blocks: &Blocks<'_>) -> Result<(), StoreError> {
        self.named(blocks.status())
    }

    /// The marks beside a block.
    pub(super) fn marks(
        &self,
        snapshot: Option<&Snapshot<'_>>,
        key: [u8; 12],
    ) -> Result<Option<impl Deref<Target = [u8]>>, StoreError> {
        self.named(
            self.db
                .get_pinned_cf_opt(self.family(MARKS), key, &reading(snapshot)),
        )
    }

    /// A part as it was put.
    pub(super) fn part(
        &self,
        key: [u8; 20],
    ) -> Result<Option<impl Deref<Target = [u8]>>, StoreError> {
        self.named(self.db.get_pinned_cf(self.family(PARTS), key))
    }

    /// All small rows whose key begins so.
    pub(super) fn rows(&self, prefix: &[u8]) -> Result<Vec<Row>, StoreError> {
        let mut options = ReadOptions::default();
        options.set_iterate_range(rocksdb::PrefixRange(prefix));
        let rows = self.db.iterator_opt(IteratorMode::Start, options);
        self.named(rows.collect())
    }

    /// A small row of fixed length, if it is there.
    pub(super) fn number_row<T>(
        &self,
        key: &[u8],
        decode: fn(&[u8]) -> Option<T>,
    ) -> Result<Option<T>, StoreError> {
        let Some(row) = self.named(self.db.get_pinned(key))? else {
            return Ok(None);
        };
        match decode(&row) {
            Some(value) => Ok(Some(value)),
            None => Err(self.damaged(&format!("the row {}", key.escape_ascii()))),
        }
    }

    /// The error for something in the database that makes no sense.
    pub(super) fn damaged(&self, what: &str) -> StoreError {
        corrupt(&self.path, &format!("cannot make sense of {what}"))
    }

    fn family(&self, name: &str) -> &ColumnFamily {
        self.db
            .cf_handle(name)
            .expect("it was opened with the database")
    }

    fn named<T>(&self, result: Result<T, rocksdb::Error>) -> Result<T, StoreError> {
        result.map_err(|error| rocks_error(&self.path, &error))
    }
}

/// Changes to be made together.
pub(super) struct Changes<'a> {
    engine: &'a Engine,
    batch: WriteBatch,
}

impl Changes<'_> {
    pub(super) fn put_block(&mut self, key: [u8; 12], block: &[u8]) {
        self.batch.put_cf(self.engine.family(BLOCKS), key, block);
    }

    /// Deletes a block that was put once.
    pub(super) fn delete_block(&mut self, key: [u8; 12]) {
        self.batch.single_delete_cf(self.engine.family(BLOCKS), key);
    }

    pub(super) fn put_marks(&mut self, key: [u8; 12], marks: &[u8]) {
        self.batch.put_cf(self.engine.family(MARKS), key, marks);
    }

    pub(super) fn delete_marks(&mut self, key: [u8; 12]) {
        self.batch.delete_cf(self.engine.family(MARKS), key);
    }

    /// Deletes all blocks and marks of a queue. Its number must not be used
    /// again.
    pub(super) fn delete_blocks_of(&mut self, queue: QueueNumber) {
        for family in [BLOCKS, MARKS] {
            let (start, end) = (keys::block_key(queue, 0), keys::blocks_end(queue));
            let family = self.engine.family(family);
            self.batch.delete_range_cf(family, &start[..], &end[..]);
        }
    }

    pub(super) fn put_part(&mut self, key: [u8; 20], part: &[u8]) {
        self.batch.put_cf(self.engine.family(PARTS), key, part);
    }

    pub(super) fn delete_part(&mut self, key: [u8; 20]) {
        self.batch.delete_cf(self.engine.family(PARTS), key);
    }

    /// Deletes the parts of a message of which it is not known how many there
    /// are. Reads are slower for each such range until it is compacted.
    pub(super) fn delete_all_parts(&mut self, message: Identity) {
        let (start, end) = (keys::part_key(message, 0), keys::parts_end(message));
        let family = self.engine.family(PARTS);
        self.batch.delete_range_cf(family, &start[..], &end[..]);
    }

    pub(super) fn put_row(&mut self, key: &[u8], value: &[u8]) {
        self.batch.put(key, value);
    }

    pub(super) fn delete_row(&mut self, key: &[u8]) {
        self.batch.delete(key);
    }
}

fn reading(snapshot: Option<&Snapshot<'_>>) -> ReadOptions {
    let mut options = ReadOptions::default();
    // Checksums of what is read are verified unless told otherwise.
    if let Some(snapshot) = snapshot {
        options.set_snapshot(snapshot);
    }
    options
}

fn database_options() -> Options {
    let mut options = Options::default();
    options.create_if_missing(true);
    options.create_missing_column_families(true);
    options.set_paranoid_checks(true);
    // A torn end of the log is dropped. Whether more than that was dropped, the
    // mark tells; and of a log that should be there, RocksDB itself.
    options.set_wal_recovery_mode(DBRecoveryMode::PointInTime);
    options.set_track_and_verify_wals_in_manifest(true);
    // Written data is with the kernel at once, so that it survives SIGKILL.
    options.set_manual_wal_flush(false);
    // A reused file would hold old records behind the new ones.
    options.set_recycle_log_file_num(0);
    options.set_max_total_wal_size(LOG_BYTES_MAX);
    options.set_max_open_files(OPEN_FILES_MAX);
    // One to flush and one to compact: machines have as few as two processors,
    // and the service thread wants one.
    options.set_max_background_jobs(2);
    // Written tables go to the disk as they grow, not all at their end.
    options.set_bytes_per_sync(1 << 20);
    // RocksDB's own text log.
    options.set_log_level(LogLevel::Warn);
    options.set_max_log_file_size(1 << 20);
    options.set_keep_log_file_num(4);
    options.set_stats_dump_period_sec(0);
    options.set_stats_persist_period_sec(0);
    options
}

fn family_options(memory_bytes: usize) -> Options {
    let mut options = Options::default();
    options.set_compression_type(DBCompressionType::None);
    options.set_bottommost_compression_type(DBCompressionType::None);
    options.set_write_buffer_size(memory_bytes);
    options
}

fn rows_options() -> Options {
    family_options(ROWS_MEMORY)
}

fn blocks_options() -> Options {
    let mut options = family_options(BLOCKS_MEMORY);
    options.set_max_write_buffer_number(BLOCKS_MEMORIES_MAX);
    // Twice as many tables as usual are merged at once: a backlog is then copied
    // half as often, and blocks are so large that reads hardly notice.
    options.set_level_zero_file_num_compaction_trigger(8);
    options.set_target_file_size_base(64 << 20);
    options.set_max_bytes_for_level_base(512 << 20);
    // A table that is half tombstones is compacted soon: the blocks that they
    // delete are far larger than they.
    options.add_compact_on_deletion_collector_factory(0, 0, 0.5);
    options.set_enable_blob_files(true);
    options.set_min_blob_size(BLOB_BYTES_MIN);
    options.set_blob_compression_type(DBCompressionType::None);
    options.set_enable_blob_gc(true);
    options
}

fn marks_options() -> Options {
    let mut options = family_options(MARKS_MEMORY);
    options.add_compact_on_deletion_collector_factory(0, 0, 0.5);
    options
}

fn parts_options() -> Options {
    let mut options = family_options(PARTS_MEMORY);
    options.set_max_write_buffer_number(PARTS_MEMORIES_MAX);
    options.add_compact_on_deletion_collector_factory(0, 0, 0.5);
    options.set_enable_blob_files(true);
    options.set_min_blob_size(PARTS_BLOB_BYTES_MIN);
    options.set_blob_file_size(PARTS_FILE_BYTES);
    options.set_blob_compression_type(DBCompressionType::None);
    // RocksDB's collection copies what lives in the oldest files each time that
    // it compacts their keys. The keys of a whole backlog of parts lie in one
    // table, so each compaction would copy a share of the backlog. Small files,
    // which go when nothing in them lives, need no collection.
    options.set_enable_blob_gc(false);
    options
}

fn cached(mut options: Options, cache: &Cache) -> Options {
    let mut table = BlockBasedOptions::default();
    table.set_block_cache(cache);
    // So that their memory is bounded too.
    table.set_cache_index_and_filter_blocks(true);
    table.set_pin_l0_filter_and_index_blocks_in_cache(true);
    table.set_bloom_filter(10.0, false);
    options.set_block_based_table_factory(&table);
    options
}

fn rocks_error(path: &Path, error: &rocksdb::Error) -> StoreError {
    let text = error.as_ref();
    match error.kind() {
        ErrorKind::Corruption => corrupt(path, text),
        _ if text.contains("No space left") => StoreError::Failed(format!(
            "{}: {text}: free some disk space, then start the broker again",
            path.display()
        )),
        _ => StoreError::Failed(format!("{}: {text}", path.display())),
    }
}

fn corrupt(path: &Path, what: &str) -> StoreError {
    StoreError::Corrupt(format!(
        "{}: {what}. Look after the disk, then restore the whole data folder from a backup, or \
         move it away to start empty",
        path.display()
    ))
}
