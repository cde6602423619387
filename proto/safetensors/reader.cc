#include "proto/safetensors/reader.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace shardd::safetensors {
namespace {

using Json = nlohmann::json;

constexpr char kMetadataKey[] = "__metadata__";
constexpr char kRemedy[] = "; the file is damaged or not safetensors: write or copy it again";

absl::Status Malformed(const std::string& path, const std::string& what) {
  return absl::DataLossError(absl::StrCat(path, ": ", what, kRemedy));
}

// Parses JSON, refusing objects that name a key twice (the parser alone would
// keep the last) and nesting deeper than a header has.
absl::Status ParseStrictJson(const std::string& path, const char* begin, const char* end,
                             Json* out) {
  std::vector<std::set<std::string>> keys;
  std::string fault;
  auto check = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > 3) fault = "its header is nested too deeply";
    if (!fault.empty()) return false;
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key &&
        !keys.back().insert(value.get_ref<const std::string&>()).second) {
      fault = absl::StrCat("its header names '", value.get_ref<const std::string&>(), "' twice");
      return false;
    }
    return true;
  };
  *out = Json::parse(begin, end, check, /*allow_exceptions=*/false);
  if (!fault.empty()) return Malformed(path, fault);
  if (out->is_discarded() || !out->is_object()) {
    return Malformed(path, "its header is not a JSON object");
  }
  return absl::OkStatus();
}

absl::Status ParseMetadata(const std::string& path, const Json& json,
                           std::map<std::string, std::string>* out) {
  if (!json.is_object()) return Malformed(path, "its __metadata__ is not an object");
  for (const auto& [key, value] : json.items()) {
    if (!value.is_string()) {
      return Malformed(path, absl::StrCat("metadata '", key, "' is not a string"));
    }
    (*out)[key] = value.get<std::string>();
  }
  return absl::OkStatus();
}

absl::Status ParseTensor(const std::string& path, const std::string& name, const Json& json,
                         TensorInfo* out) {
  auto malformed = [&](const std::string& what) {
    return Malformed(path, absl::StrCat("tensor '", name, "' ", what));
  };
  if (!json.is_object() || !json.contains("dtype") || !json["dtype"].is_string() ||
      !json.contains("shape") || !json["shape"].is_array() || !json.contains("data_offsets") ||
      !json["data_offsets"].is_array() || json["data_offsets"].size() != 2) {
    return malformed("lacks dtype, shape or data_offsets");
  }
  const std::string& dtype_name = json["dtype"].get_ref<const std::string&>();
  const std::optional<DType> dtype = ParseDType(dtype_name);
  if (!dtype.has_value()) {
    return absl::UnimplementedError(
        absl::StrCat(path, ": tensor '", name, "' has dtype ", dtype_name,
                     ", which is not supported; convert it to F32, BF16, F16, F64, I32 or I64"));
  }
  out->name = name;
  out->dtype = *dtype;
  for (const Json& extent : json["shape"]) {
    // Extents and offsets that do not fit are stored by the parser as double or
    // as unsigned values above INT64_MAX: both are refused here.
    if (!extent.is_number_unsigned() || extent.get<uint64_t>() > INT64_MAX) {
      return malformed("has an extent that is no size");
    }
    out->shape.push_back(extent.get<int64_t>());
  }
  const Json& begin = json["data_offsets"][0];
  const Json& end = json["data_offsets"][1];
  if (!begin.is_number_unsigned() || !end.is_number_unsigned()) {
    return malformed("has data_offsets that are no sizes");
  }
  out->begin = begin.get<uint64_t>();
  out->end = end.get<uint64_t>();
  uint64_t bytes = 0;
  if (absl::Status s = ShapeBytes("its shape", out->shape, *dtype, &bytes); !s.ok()) {
    return malformed(absl::StrCat("is refused: ", s.message()));
  }
  if (out->end < out->begin || out->end - out->begin != bytes) {
    return malformed(absl::StrCat("takes ", bytes, " bytes by its shape but has data_offsets ",
                                  out->begin, "..", out->end));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Reader>> Reader::Open(const std::string& path) {
  std::unique_ptr<Reader> reader(new Reader);
  reader->path_ = path;
  if (absl::Status s = reader->Map(); !s.ok()) return s;
  if (absl::Status s = reader->ParseHeader(); !s.ok()) return s;
  if (absl::Status s = reader->CheckLayout(); !s.ok()) return s;
  return reader;
}

Reader::~Reader() {
  if (map_ != nullptr) munmap(const_cast<std::byte*>(map_), file_bytes_);
}

absl::Status Reader::Map() {
  const int fd = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // no pipe is waited for
  if (fd < 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat(path_, ": cannot open for reading"));
  }
  struct stat info = {};
  absl::Status status;
  if (fstat(fd, &info) != 0) {
    status = absl::ErrnoToStatus(errno, absl::StrCat(path_, ": cannot stat"));
  } else if (!S_ISREG(info.st_mode)) {
    status = absl::InvalidArgumentError(absl::StrCat(path_, ": is not a regular file"));
  } else if (info.st_size < 8) {
    status = Malformed(path_, absl::StrCat("has ", info.st_size, " bytes, fewer than a header"));
  } else {
    void* map = mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) {
      status = absl::ErrnoToStatus(errno, absl::StrCat(path_, ": cannot map"));
    } else {
      map_ = static_cast<const std::byte*>(map);
      file_bytes_ = static_cast<uint64_t>(info.st_size);
      status = ReadHeader(fd);
    }
  }
  close(fd);
  return status;
}

// Copied, not mapped: whoever cuts the file short meanwhile gets an error, not a SIGBUS.
absl::Status Reader::ReadHeader(int fd) {
  const auto read = [&](void* to, size_t bytes, off_t offset) -> absl::Status {
    for (size_t done = 0; done < bytes;) {
      const ssize_t n =
          pread(fd, static_cast<char*>(to) + done, bytes - done, offset + static_cast<off_t>(done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return absl::ErrnoToStatus(errno, absl::StrCat(path_, ": cannot read"));
      if (n == 0) return Malformed(path_, "ends in its header");
      done += static_cast<size_t>(n);
    }
    return absl::OkStatus();
  };
  uint64_t header_bytes = 0;
  if (absl::Status s = read(&header_bytes, sizeof(header_bytes), 0); !s.ok()) return s;
  if (header_bytes > kMaxHeaderBytes || header_bytes > file_bytes_ - 8) {
    return Malformed(path_, absl::StrCat("its header length is ", header_bytes, " in a file of ",
                                         file_bytes_, " bytes"));
  }
  data_start_ = 8 + header_bytes;
  header_.resize(header_bytes);
  return read(header_.data(), header_bytes, 8);
}

absl::Status Reader::ParseHeader() {
  const std::string text = std::move(header_);
  Json header;
  absl::Status status = ParseStrictJson(path_, text.data(), text.data() + text.size(), &header);
  if (!status.ok()) return status;
  for (const auto& [name, json] : header.items()) {
    if (name == kMetadataKey) {
      if (absl::Status s = ParseMetadata(path_, json, &metadata_); !s.ok()) return s;
      continue;
    }
    TensorInfo tensor;
    if (absl::Status s = ParseTensor(path_, name, json, &tensor); !s.ok()) return s;
    tensors_.push_back(std::move(tensor));
  }
  return absl::OkStatus();
}

absl::Status Reader::CheckLayout() {
  std::sort(tensors_.begin(), tensors_.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  const uint64_t data_bytes = file_bytes_ - data_start_;
  uint64_t expected = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const TensorInfo& tensor = tensors_[i];
    if (tensor.begin != expected) {
      return Malformed(path_, absl::StrCat("tensor '", tensor.name, "' begins at ", tensor.begin,
                                           " where ", expected, " is due (overlap or hole)"));
    }
    if (tensor.end > data_bytes) {
      return Malformed(path_, absl::StrCat("tensor '", tensor.name, "' ends at ", tensor.end,
                                           " of ", data_bytes, " bytes of data"));
    }
    expected = tensor.end;
    index_[tensor.name] = i;
  }
  if (expected != data_bytes) {
    return Malformed(
        path_, absl::StrCat("its tensors end at ", expected, " of ", data_bytes, " bytes of data"));
  }
  return absl::OkStatus();
}

const TensorInfo* Reader::Find(std::string_view name) const {
  const auto it = index_.find(std::string(name));
  return it == index_.end() ? nullptr : &tensors_[it->second];
}

absl::StatusOr<std::span<const std::byte>> Reader::Bytes(std::string_view name) const {
  const TensorInfo* tensor = Find(name);
  if (tensor == nullptr) {
    return absl::NotFoundError(absl::StrCat(path_, ": has no tensor '", std::string(name),
                                            "' (it has ", tensors_.size(), " tensors)"));
  }
  return std::span<const std::byte>(map_ + data_start_ + tensor->begin, tensor->bytes());
}

absl::StatusOr<std::span<const std::byte>> Reader::CheckedBytes(std::string_view name, DType dtype,
                                                                size_t element_bytes) const {
  absl::StatusOr<std::span<const std::byte>> bytes = Bytes(name);
  if (!bytes.ok()) return bytes;
  const DType actual = Find(name)->dtype;
  if (actual != dtype || DTypeSize(dtype) != element_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        path_, ": tensor '", std::string(name), "' is ", std::string(DTypeName(actual)), ", not ",
        std::string(DTypeName(dtype)), "; convert the file"));
  }
  return bytes;
}

}  // namespace shardd::safetensors
