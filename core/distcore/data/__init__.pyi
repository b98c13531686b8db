from distcore.data.cache import cache_root as cache_root
from distcore.data.cache import cached_folder as cached_folder
from distcore.data.files import Source as Source
from distcore.data.files import check_source as check_source
from distcore.data.files import data_format as data_format
from distcore.data.files import read_records as read_records
from distcore.data.files import source_digest as source_digest
from distcore.data.files import source_name as source_name
from distcore.data.formats import Record as Record
from distcore.data.formats import arrow_class_names as arrow_class_names
from distcore.data.formats import describe_value as describe_value
from distcore.data.formats import row_error as row_error
from distcore.data.per_epoch import row_random as row_random
from distcore.data.splits import Split as Split
from distcore.data.splits import find_split as find_split

__all__: list[str]
