#include "server/daemon.h"

#include <grp.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <linux/magic.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "kernels/isa.h"
#include "proto/contract/attach.h"
#include "proto/contract/version.h"
#include "server/admin/admin_service.h"
#include "server/checkpoint/manager.h"
#include "server/control/attach_server.h"
#include "server/control/control_service.h"
#include "server/control/job_registry.h"
#include "server/control/session_registry.h"
#include "server/env/fault_guard.h"
#include "server/env/faulty_file_system.h"
#include "server/env/file_system.h"
#include "server/journal/journal_directory.h"
#include "server/peer/links.h"
#include "server/peer/mirrors.h"

namespace shardd {

namespace {

using contract::ErrnoStatus;

absl::StatusOr<kernels::Isa> ChooseIsa(const std::string& wanted) {
  if (wanted == "auto") return kernels::BestIsa();
  std::string names;
  for (kernels::Isa isa : kernels::SupportedIsas()) {
    if (kernels::IsaName(isa) == wanted) return isa;
    absl::StrAppend(&names, names.empty() ? "" : ", ", kernels::IsaName(isa));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("step.isa is '", wanted, "', which this CPU cannot run; it can: ", names));
}

size_t ChooseThreads(uint32_t wanted) {
  if (wanted > 0) return wanted;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return static_cast<size_t>(CPU_COUNT(&set));
}

absl::Status MakeParents(const std::string& path) {
  for (size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1)) {
    const std::string parent = path.substr(0, at);
    if (mkdir(parent.c_str(), 0755) == 0) {
      // Regardless of umask: clients must be able to reach the socket.
      chmod(parent.c_str(), 0755);
    } else if (errno != EEXIST) {
      return ErrnoStatus(errno,
                         absl::StrCat("cannot make the directory ", parent, " of listen.socket"));
    }
  }
  return absl::OkStatus();
}

absl::Status OpenToClients(const std::string& path, const v1::DaemonConfig::Listen& listen) {
  if (!listen.socket_group().empty()) {
    const group* entry = getgrnam(listen.socket_group().c_str());
    if (entry == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("listen.socket_group '", listen.socket_group(), "' does not exist"));
    }
    if (chown(path.c_str(), static_cast<uid_t>(-1), entry->gr_gid) != 0) {
      return ErrnoStatus(errno,
                         absl::StrCat("cannot give ", path, " to group ", listen.socket_group()));
    }
  }
  const auto mode = static_cast<mode_t>(std::stoul(listen.socket_mode(), nullptr, 8));
  if (chmod(path.c_str(), mode) != 0)
    return ErrnoStatus(errno, absl::StrCat("cannot chmod ", path));
  return absl::OkStatus();
}

class DaemonImpl final : public Daemon {
 public:
  explicit DaemonImpl(DaemonOptions options)
      : options_(std::move(options)), config_(options_.config) {}

  ~DaemonImpl() override {
    failpoints_.ReleaseAll();
    if (links_ != nullptr) links_->Stop();
    if (mirrors_ != nullptr) mirrors_->Stop();
    if (attach_ != nullptr) attach_->Stop();
    if (server_ != nullptr) {
      // Calls that wait for other ranks do not end by themselves.
      server_->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(500));
    }
    if (checkpoints_ != nullptr) checkpoints_->Stop();
    // Drops what is queued, which answers the calls that are left.
    if (jobs_ != nullptr) jobs_->StopAll();
    if (server_ != nullptr) server_->Wait();
    admin_.reset();
    control_.reset();
    jobs_.reset();
    checkpoints_.reset();
    if (listening_) {
      unlink(config_.listen().socket().c_str());
      unlink((config_.listen().socket() + contract::kAttachSuffix).c_str());
    }
  }

  absl::Status Start() {
    env::InstallFaultHandler();
    started_ = absl::Now();
    idle_since_ = started_;
    if (absl::Status s = failpoints_.ArmFromText(config_.arm_failpoint()); !s.ok()) return s;
    absl::StatusOr<env::FaultPlan> faults = env::ParseFaultPlan(config_.file_faults());
    if (!faults.ok()) return faults.status();
    if (!config_.file_faults().empty()) {
      faulty_files_ =
          std::make_unique<env::FaultyFileSystem>(env::PosixFileSystem(), *std::move(faults));
    }
    absl::StatusOr<kernels::Isa> isa = ChooseIsa(config_.step().isa());
    if (!isa.ok()) return isa.status();
    absl::StatusOr<store::StateDirectory> directory =
        store::StateDirectory::Open(config_.store().directory());
    if (!directory.ok()) return directory.status();
    directory_ = std::make_unique<store::StateDirectory>(*std::move(directory));
    if (absl::Status status = MakeBudget(); !status.ok()) return status;
    pool_ = std::make_unique<env::ThreadPool>(ChooseThreads(config_.step().threads()), [] {
      // For the thread's whole life.
      static thread_local kernels::ScopedFlushToZero flush;
      (void)flush;
    });
    sessions_ = std::make_unique<control::SessionRegistry>(config_.limits().sessions());
    step::JobEnvironment environment;
    environment.failpoints = &failpoints_;
    environment.files = faulty_files_ != nullptr ? faulty_files_.get() : env::PosixFileSystem();
    environment.pool = pool_.get();
    environment.isa = *isa;
    environment.spin = absl::Microseconds(config_.step().spin_microseconds());
    environment.counters = &counters_;
    environment.now = [] { return absl::Now(); };
    environment.log = options_.log;
    environment.on_session_end = [this](const std::shared_ptr<step::Session>& session) {
      sessions_->Remove(*session);
    };
    environment.on_save = [this](const std::string& job, std::shared_ptr<step::SpanSave> save,
                                 const v1::PeerMessage::Save& arm) {
      checkpoints_->SavePart(job, std::move(save), arm);
    };
    OpenSpill();
    descriptors_ = std::make_unique<store::DescriptorStore>(std::move(options_.descriptors));
    jobs_ = std::make_unique<control::JobRegistry>(environment, directory_.get(),
                                                   descriptors_.get(), spill_.get(), budget_.get(),
                                                   config_.limits().jobs());
    if (absl::Status s = UseJournals(environment.files); !s.ok()) return s;
    if (absl::Status status = ListenToPeers(environment.files); !status.ok()) return status;
    MakeCheckpoints(environment);
    admin::ServerFacts facts;
    facts.adopted = jobs_->AdoptAll();
    facts.version = contract::kVersion;
    facts.isa = kernels::IsaName(*isa);
    facts.threads = static_cast<uint32_t>(pool_->threads());
    facts.started = started_;
    facts.failpoints = config_.failpoints();
    control_ = std::make_unique<control::ControlService>(sessions_.get(), jobs_.get(), &counters_);
    admin_ = std::make_unique<admin::AdminService>(
        facts, sessions_.get(), jobs_.get(), directory_.get(), budget_.get(), &failpoints_,
        &counters_, checkpoints_.get(), options_.on_drained, links_.get());
    if (absl::Status status = Listen(); !status.ok()) return status;
    if (links_ != nullptr) links_->Start();
    return absl::OkStatus();
  }

  const std::string& socket() const override { return config_.listen().socket(); }

  void SpillIdle(absl::Duration idle) override { jobs_->SpillIdle(idle); }

  absl::Duration IdleTime() override {
    const absl::Time now = absl::Now();
    if (sessions_->size() > 0) idle_since_ = now;
    return now - idle_since_;
  }

 private:
  absl::Status UseJournals(env::FileSystem* files) {
    if (config_.journal().directory().empty()) return absl::OkStatus();
    absl::StatusOr<journal::JournalDirectory> journals =
        journal::JournalDirectory::Open(files, config_.journal().directory());
    if (!journals.ok()) return journals.status();
    journals_ = std::make_unique<journal::JournalDirectory>(*std::move(journals));
    struct statfs fs {};
    if (statfs(journals_->path().c_str(), &fs) == 0 && fs.f_type == TMPFS_MAGIC) {
      options_.log(absl::StrCat("journal.directory ", journals_->path(),
                                " is on a tmpfs, which does not outlive the machine"));
    }
    jobs_->UseJournals(journals_.get(), config_.journal());
    return absl::OkStatus();
  }

  void MakeCheckpoints(const step::JobEnvironment& environment) {
    checkpoint::ManagerOptions options;
    options.config = config_.checkpoint();
    options.version = contract::kVersion;
    options.threads = pool_->threads();
    options.files = environment.files;
    options.failpoints = &failpoints_;
    options.budget = budget_.get();
    options.jobs = jobs_.get();
    options.log = options_.log;
    checkpoints_ = std::make_unique<checkpoint::Manager>(std::move(options));
    jobs_->SetInitialState([this](const std::string& job, const v1::OpenRequest& parameters,
                                  const contract::Layout& layout, uint32_t uid) {
      return checkpoints_->InitialState(job, parameters, layout, uid);
    });
  }

  absl::Status MakeBudget() {
    uint64_t bytes = config_.memory().budget_bytes();
    if (bytes == 0) {
      absl::StatusOr<uint64_t> free = directory_->FreeBytes();
      if (!free.ok()) return free.status();
      bytes = *free - *free / 8 + directory_->JobBytes();
    }
    budget_ = std::make_unique<env::Budget>(bytes);
    return absl::OkStatus();
  }

  // Without one the daemon works, and holds what nobody uses in memory.
  void OpenSpill() {
    if (config_.job_ttl_seconds() < 0) return;
    absl::StatusOr<std::unique_ptr<store::SpillDirectory>> spill =
        store::SpillDirectory::Open(env::PosixFileSystem(), config_.spill().directory(),
                                    [this](const char* point) { failpoints_.Reach(point); });
    if (spill.ok()) {
      spill_ = *std::move(spill);
    } else {
      options_.log(
          absl::StrCat("jobs stay in memory when nobody uses them: ", spill.status().message()));
    }
  }

  absl::Status OpenMirrors(env::FileSystem* files) {
    peer::Mirrors::Options options;
    options.links = links_.get();
    options.files = files;
    options.failpoints = &failpoints_;
    options.config = config_.journal();
    options.log = options_.log;
    options.on_list = [this](v1::PeerMessage::MirrorList list) {
      jobs_->OnMirrorList(std::move(list));
    };
    absl::StatusOr<std::unique_ptr<peer::Mirrors>> mirrors =
        peer::Mirrors::Open(std::move(options));
    if (!mirrors.ok()) return mirrors.status();
    mirrors_ = *std::move(mirrors);
    jobs_->UseMirrors(mirrors_.get());
    return absl::OkStatus();
  }

  absl::Status ListenToPeers(env::FileSystem* files) {
    if (config_.peer().name().empty()) return absl::OkStatus();
    peer::Links::Options options;
    options.config = config_.peer();
    options.on_message = [this](const std::string& peer, peer::Message message) {
      if (mirrors_->OnMessage(peer, &message)) return;
      jobs_->OnPeerMessage(peer, std::move(message));
    };
    options.on_new_process = [this](const std::string& peer) {
      jobs_->OnPeerProcess(peer);
      mirrors_->OnNewProcess(peer);
    };
    options.log = options_.log;
    options.now = [] { return absl::Now(); };
    absl::StatusOr<std::unique_ptr<peer::Links>> links = peer::Links::Listen(std::move(options));
    if (!links.ok()) return links.status();
    links_ = *std::move(links);
    jobs_->ShareWith(links_.get());
    if (absl::Status status = OpenMirrors(files); !status.ok()) return status;
    options_.log(
        absl::StrCat("daemon ", links_->self(), " listens for peers at port ", links_->port()));
    return absl::OkStatus();
  }

  absl::Status Listen() {
    const std::string path = config_.listen().socket();
    const std::string attach_path = path + contract::kAttachSuffix;
    if (absl::Status status = MakeParents(path); !status.ok()) return status;
    if (contract::ConnectUnix(attach_path, SOCK_SEQPACKET).ok()) {
      return absl::AlreadyExistsError(absl::StrCat("another daemon listens at ", path,
                                                   "; stop it, or choose another listen.socket"));
    }
    unlink(attach_path.c_str());
    unlink(path.c_str());
    absl::StatusOr<contract::UniqueFd> listener =
        contract::ListenUnix(attach_path, SOCK_SEQPACKET, 256);
    if (!listener.ok()) return listener.status();
    listening_ = true;
    if (absl::Status s = OpenToClients(attach_path, config_.listen()); !s.ok()) return s;

    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    int bound = 0;
    builder.AddListeningPort("unix:" + path, grpc::InsecureServerCredentials(), &bound);
    builder.RegisterService(control_.get());
    builder.RegisterService(admin_.get());
    // A layout of a million parameters fits; what all clients together may queue is bounded.
    builder.SetMaxReceiveMessageSize(64 << 20);
    grpc::ResourceQuota quota("shardd");
    quota.Resize(512 << 20);
    builder.SetResourceQuota(quota);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) {
      return absl::UnavailableError(
          absl::StrCat("cannot listen at ", path, "; see whether its directory can be written"));
    }
    if (absl::Status s = OpenToClients(path, config_.listen()); !s.ok()) return s;

    control::AttachOptions attach;
    attach.path = attach_path;
    attach.version = contract::kVersion;
    attach.ring_bytes_max = config_.memory().ring_bytes_max();
    attach.max_connections = config_.limits().sessions() + 64;
    attach.budget = budget_.get();
    attach.counters = &counters_;
    attach.log = options_.log;
    attach_ = std::make_unique<control::AttachServer>(std::move(attach), *std::move(listener),
                                                      sessions_.get());
    attach_->Start();
    return absl::OkStatus();
  }

  DaemonOptions options_;
  const v1::DaemonConfig config_;
  absl::Time started_;
  absl::Time idle_since_;
  bool listening_ = false;
  env::Failpoints failpoints_;
  std::unique_ptr<env::FaultyFileSystem> faulty_files_;
  std::unique_ptr<journal::JournalDirectory> journals_;
  step::Counters counters_;
  std::unique_ptr<store::StateDirectory> directory_;
  std::unique_ptr<env::Budget> budget_;
  std::unique_ptr<env::ThreadPool> pool_;
  std::unique_ptr<control::SessionRegistry> sessions_;
  std::unique_ptr<store::SpillDirectory> spill_;
  std::unique_ptr<store::DescriptorStore> descriptors_;
  std::unique_ptr<peer::Links> links_;
  std::unique_ptr<peer::Mirrors> mirrors_;
  std::unique_ptr<control::JobRegistry> jobs_;
  std::unique_ptr<checkpoint::Manager> checkpoints_;
  std::unique_ptr<control::ControlService> control_;
  std::unique_ptr<admin::AdminService> admin_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<control::AttachServer> attach_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(DaemonOptions options) {
  auto daemon = std::make_unique<DaemonImpl>(std::move(options));
  if (absl::Status status = daemon->Start(); !status.ok()) return status;
  return daemon;
}

}  // namespace shardd
