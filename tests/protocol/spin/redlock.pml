/* Redlock, small enough to look at every state it can come to.

   Three nodes, two clients, any number of extensions, one crash. Whatever is not forbidden below
   may happen at any moment: a request is carried out late, an answer is read late, a client gives
   up, gives back, or stands still. Time passes in ticks, and every quantity of time is kept as the
   ticks that are left of it, so that there are finitely many states though time never ends.

   The rules are those of lease.py, quorum.py and channel.py; test_model.py compares the numbers.
   Each -D below takes a rule or a premise away, and then an assertion must fail. With SHARED the
   first client is a writer, and there are two readers, each of which a node keeps by itself. */

#define N 3
#ifdef SHARED
#define CLIENTS 3
#define READER(c) ((c) > 0)
#else
#define CLIENTS 2
#define READER(c) 0
#endif
#ifndef TTL
#define TTL 3
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef QUORUM
#define QUORUM 2
#endif
#ifndef DRIFT
#define DRIFT 1                  /* ticks of a ttl that are never counted as held */
#endif
#ifndef AHEAD
#define AHEAD 1                  /* ticks by which a node may drop a token too early */
#endif
#ifndef AWAY
#define AWAY (TTL + DRIFT)       /* ticks for which a node that forgot has no vote */
#endif
#ifndef TRIES
#define TRIES 1                  /* attempts of each client, each with a token of its own */
#endif

/* Phases of a client. */
#define IDLE 0
#define ASKING 1
#define HOLDING 2
#define LOST 3
/* Requests. */
#define NOTHING 0
#define SET 1
#define EXTEND 2
#define RELEASE 3
/* Answers. */
#define YES 1
#define NO 2

typedef Client {
  byte phase;
  bit overtaken;   /* with REVIVE: another was granted the lock since it was lost */
  byte tries;
  byte token
};

/* A client's connection to a node: a queue of two requests at most, and one answer. */
typedef Link {
  byte first;
  byte second;
  byte other;      /* with TWO_CONNECTIONS: a release on a connection of its own */
  byte token;      /* whose requests these are */
  bit waits;       /* a request that may set the token has not been answered */
  byte reply;
  byte worth;      /* ticks left of the ttl since that request was sent */
  byte expiry;     /* ticks left of the ttl since the last acknowledged request was sent */
  bit wrote;       /* something may have been set here */
  bit freed        /* a release of this token has been carried out here */
};

typedef Node {
  byte owner;      /* the token it holds */
  byte left;       /* ticks until it drops that */
#ifdef SHARED
  byte reads[3];   /* ticks until it drops each reader, by client */
#endif
  byte away        /* ticks until it votes again */
};

Client client[CLIENTS];
Link link[CLIENTS * N];
Node node[N];
byte crashes = CRASHES;

#define LINK(c, i) link[(c) * N + (i)]
#define VALID(c, i) (LINK(c, i).expiry > DRIFT)
/* The quorum-th largest expiry, less the drift, is still to come. */
#define IN_TIME(c) (VALID(c, 0) + VALID(c, 1) + VALID(c, 2) >= QUORUM)

#ifdef SHARED
#define READS(c, i) node[i].reads[c]
#define OURS(c, i) (READER(c) -> READS(c, i) > 0 : node[i].owner == LINK(c, i).token)
#ifdef READS_BESIDE
#define FREE(c, i) (READER(c) || (node[i].owner == NOTHING && !READS(1, i) && !READS(2, i)))
#else
#define FREE(c, i) \
  (node[i].owner == NOTHING && (READER(c) || (!READS(1, i) && !READS(2, i))))
#endif
#else
#define OURS(c, i) (node[i].owner == LINK(c, i).token)
#define FREE(c, i) (node[i].owner == NOTHING)
#endif

/* Answers count for nothing any more: fewer states. */
inline past_caring(c, i) {
  LINK(c, i).expiry = 0;
#ifndef REVIVE
  LINK(c, i).waits = 0;
  LINK(c, i).reply = NOTHING;
  LINK(c, i).worth = 0
#endif
}

inline count_again(c) {
  if
  :: client[c].phase == HOLDING && !IN_TIME(c) ->
     client[c].phase = LOST;
     past_caring(c, 0); past_caring(c, 1); past_caring(c, 2)
  :: else
  fi
}

inline put(c, i, verb) {
  if
  :: LINK(c, i).first == NOTHING -> LINK(c, i).first = verb
  :: else -> LINK(c, i).second = verb
  fi
}

/* Who has not answered is asked nothing new. */
inline ask(c, i, verb) {
  if
  :: LINK(c, i).first == NOTHING && LINK(c, i).other == NOTHING && !LINK(c, i).waits &&
     LINK(c, i).expiry < TTL ->
     LINK(c, i).first = verb;
     if
     :: LINK(c, i).token != client[c].token -> LINK(c, i).freed = 0
     :: else
     fi;
     LINK(c, i).token = client[c].token;
     LINK(c, i).waits = 1;
     LINK(c, i).worth = TTL;
     LINK(c, i).wrote = 1
  :: else
  fi
}

inline begin(c) {
  client[c].tries--;
  client[c].phase = ASKING;
#ifdef TOKEN_KEPT
  client[c].token = 1 + c;
#else
  client[c].token = client[c].token + CLIENTS;
#endif
  ask(c, 0, SET); ask(c, 1, SET); ask(c, 2, SET)
}

inline read_answer(c, i) {
  if
  :: LINK(c, i).reply == YES ->
     if
#ifdef REVIVE
     :: client[c].phase == LOST || client[c].phase == ASKING || client[c].phase == HOLDING ->
#else
     :: client[c].phase == ASKING || client[c].phase == HOLDING ->
#endif
#ifdef FROM_ANSWER
        LINK(c, i).expiry = TTL
#else
        LINK(c, i).expiry = LINK(c, i).worth
#endif
     :: else
     fi
  :: else -> LINK(c, i).expiry = 0
  fi;
  LINK(c, i).waits = 0;
  LINK(c, i).reply = NOTHING;
  LINK(c, i).worth = 0;
#ifdef REVIVE
  if
  :: client[c].phase == LOST && IN_TIME(c) ->
     assert(!client[c].overtaken);
     client[c].phase = HOLDING
  :: else
  fi;
#endif
  count_again(c)
}

inline undo(c, i) {
  if
  :: LINK(c, i).wrote ->
#ifdef TWO_CONNECTIONS
     LINK(c, i).other = RELEASE
#else
     put(c, i, RELEASE)
#endif
  :: else
  fi;
  LINK(c, i).waits = 0;
  LINK(c, i).reply = NOTHING;
  LINK(c, i).worth = 0;
  LINK(c, i).expiry = 0;
  LINK(c, i).wrote = 0
}

inline give_back(c) {
  client[c].phase = IDLE;
  client[c].overtaken = 0;
  undo(c, 0); undo(c, 1); undo(c, 2)
}

inline own(c, i) {
  assert(!LINK(c, i).freed);     /* no orphan: nothing of a token behind its release */
  if
#ifdef SHARED
  :: READER(c) -> if :: READS(c, i) = TTL :: READS(c, i) = TTL - AHEAD fi
#endif
  :: !READER(c) ->
     node[i].owner = LINK(c, i).token;
     if
     :: node[i].left = TTL
     :: node[i].left = TTL - AHEAD   /* its clock runs ahead of the others */
     fi
  fi
}

inline free(c, i) {
  if
#ifdef SHARED
  :: READER(c) -> READS(c, i) = 0
#endif
#ifdef BLIND_RELEASE
  :: node[i].owner != NOTHING ->
#else
  :: !READER(c) && node[i].owner == LINK(c, i).token ->
#endif
     assert(node[i].owner == LINK(c, i).token);   /* only the owner frees */
     node[i].owner = NOTHING;
     node[i].left = 0
  :: else
  fi;
#ifdef TOKEN_KEPT
  LINK(c, i).freed = 1
#else
  LINK(c, i).freed = (LINK(c, i).second || (LINK(c, i).first && LINK(c, i).other))
#endif
}

inline carry_out(c, i) {
  if
  :: LINK(c, i).first == RELEASE -> free(c, i)
  :: LINK(c, i).first != RELEASE ->
     if
     :: FREE(c, i) || (LINK(c, i).first == EXTEND && OURS(c, i)) ->
        own(c, i);
        LINK(c, i).reply = YES
     :: else ->
        if
        :: OURS(c, i) -> LINK(c, i).reply = YES
#ifdef ANY_ANSWER
        :: !OURS(c, i) && LINK(c, i).first == EXTEND ->
           LINK(c, i).reply = YES
        :: !OURS(c, i) && LINK(c, i).first == SET ->
           LINK(c, i).reply = NO
#else
        :: else -> LINK(c, i).reply = NO
#endif
        fi
     fi;
     if
     :: !LINK(c, i).waits -> LINK(c, i).reply = NOTHING   /* nobody waits for it */
     :: else
     fi
  fi;
  LINK(c, i).first = LINK(c, i).second;
  LINK(c, i).second = NOTHING
}

/* The contents of a connection are lost, but for a release: that is owed. */
inline cut(c, i) {
  if
  :: LINK(c, i).first == RELEASE || LINK(c, i).second == RELEASE -> LINK(c, i).first = RELEASE
  :: else -> LINK(c, i).first = NOTHING
  fi;
  LINK(c, i).second = NOTHING;
  LINK(c, i).waits = 0;
  LINK(c, i).reply = NOTHING;
  LINK(c, i).worth = 0
}

inline drop(i) {
#ifdef SHARED
  READS(1, i) = 0; READS(2, i) = 0;
#endif
  node[i].owner = NOTHING;
  node[i].left = 0
}

inline cut_all(i) {
  cut(0, i);
  cut(1, i)
#ifdef SHARED
  ; cut(2, i)
#endif
}

inline crash(i) {
  crashes--;
  cut_all(i);
  if
  :: true                         /* an append-only file, written at once */
  :: true ->
     drop(i);
#ifndef AMNESIA
     node[i].away = AWAY
#endif
  fi
}

/* Demoted and promoted again: it has another's data, and no connection breaks. Or, with SWAP, another
   server that has been up for long is behind its address. */
inline change(i) {
  crashes--;
#ifdef SWAP
  cut_all(i);
#endif
  drop(i);
#ifndef UNSEEN
  node[i].away = AWAY
#endif
}

#if defined(ROLE) || defined(SWAP)
#define LOSE(i) change(i)
#else
#define LOSE(i) crash(i)
#endif

#define LESS(x) x = (x > 0 -> x - 1 : 0)
/* What is not more than the drift is nothing: fewer states. */
#define LESS_WORTH(x) x = (x > DRIFT + 1 -> x - 1 : 0)

inline passes_node(i) {
  LESS(node[i].left);
  LESS(node[i].away);
  if
  :: node[i].left == 0 -> node[i].owner = NOTHING
  :: else
  fi;
#ifdef SHARED
  LESS(READS(1, i)); LESS(READS(2, i));
  LESS_WORTH(LINK(2, i).worth); LESS_WORTH(LINK(2, i).expiry);
#endif
  LESS_WORTH(LINK(0, i).worth); LESS_WORTH(LINK(0, i).expiry);
  LESS_WORTH(LINK(1, i).worth); LESS_WORTH(LINK(1, i).expiry)
}

inline tick() {
  passes_node(0); passes_node(1); passes_node(2);
  count_again(0); count_again(1)
#ifdef SHARED
  ; count_again(2)
#endif
}

/* The nodes are alike, so of all states that differ in their order only one is looked at. */
hidden int key[5];
hidden byte other;

#define SWAP(x, y) other = x; x = y; y = other
#define LINK_KEY(c, i) (LINK(c, i).first + 4 * (LINK(c, i).second + 4 * (LINK(c, i).reply + \
  3 * (LINK(c, i).waits + 2 * (LINK(c, i).wrote + 2 * (LINK(c, i).freed + \
  2 * (LINK(c, i).worth + 4 * LINK(c, i).expiry)))))))

inline swap_links(c, i, j) {
  SWAP(LINK(c, i).first, LINK(c, j).first);
  SWAP(LINK(c, i).second, LINK(c, j).second);
  SWAP(LINK(c, i).other, LINK(c, j).other);
  SWAP(LINK(c, i).token, LINK(c, j).token);
  SWAP(LINK(c, i).waits, LINK(c, j).waits);
  SWAP(LINK(c, i).reply, LINK(c, j).reply);
  SWAP(LINK(c, i).worth, LINK(c, j).worth);
  SWAP(LINK(c, i).expiry, LINK(c, j).expiry);
  SWAP(LINK(c, i).wrote, LINK(c, j).wrote);
  SWAP(LINK(c, i).freed, LINK(c, j).freed)
}

inline order(i, j) {
  key[0] = node[i].owner + 8 * node[i].left + 32 * node[i].away -
           (node[j].owner + 8 * node[j].left + 32 * node[j].away);
  key[1] = LINK_KEY(0, i) - LINK_KEY(0, j);
  key[2] = LINK_KEY(1, i) - LINK_KEY(1, j);
#ifdef SHARED
  key[3] = LINK_KEY(2, i) - LINK_KEY(2, j);
  key[4] = READS(1, i) + 4 * READS(2, i) - (READS(1, j) + 4 * READS(2, j));
#endif
  if
  :: key[0] > 0 || (key[0] == 0 && (key[1] > 0 || (key[1] == 0 && (key[2] > 0 ||
       (key[2] == 0 && (key[3] > 0 || (key[3] == 0 && key[4] > 0))))))) ->
#ifdef SHARED
     SWAP(READS(1, i), READS(1, j));
     SWAP(READS(2, i), READS(2, j));
     swap_links(2, i, j);
#endif
     SWAP(node[i].owner, node[j].owner);
     SWAP(node[i].left, node[j].left);
     SWAP(node[i].away, node[j].away);
     swap_links(0, i, j);
     swap_links(1, i, j)
  :: else
  fi
}

inline sort() { d_step { order(0, 1); order(1, 2); order(0, 1) } }

#ifdef REVIVE
#define REVIVED(c) (client[c].phase == LOST)
#else
#define REVIVED(c) 0
#endif

#ifdef SHARED
#define MAY_BEGIN(c) (c < 2 || client[1].tries < TRIES)   /* the readers are alike */
#define ALONE(c) (client[0].phase != HOLDING || \
                  (client[1].phase != HOLDING && client[2].phase != HOLDING))
#define OVERTAKES(c) skip
#ifndef EXTENDS
#define EXTENDS(c) 0                                      /* or there are too many states */
#endif
#else
#define MAY_BEGIN(c) (c == 0 || client[0].tries < TRIES)  /* both are alike */
#define ALONE(c) (client[1 - c].phase != HOLDING)
#define OVERTAKES(c) client[1 - c].overtaken = REVIVED(1 - c)
#define EXTENDS(c) 1
#endif

#define OF_CLIENT(c) \
  :: d_step { client[c].phase == IDLE && client[c].tries > 0 && MAY_BEGIN(c) -> begin(c) } \
  :: d_step { client[c].phase == ASKING && IN_TIME(c) -> client[c].phase = HOLDING; \
              assert(ALONE(c)); /* mutual exclusion */ \
              OVERTAKES(c) } \
  :: d_step { client[c].phase == HOLDING && EXTENDS(c) -> \
              ask(c, 0, EXTEND); ask(c, 1, EXTEND); ask(c, 2, EXTEND) } \
  :: d_step { client[c].phase != IDLE -> give_back(c) }

#define OF_LINK(c, i) \
  :: atomic { LINK(c, i).first != NOTHING && node[i].away == 0 -> carry_out(c, i) } \
  :: d_step { LINK(c, i).other != NOTHING && node[i].away == 0 -> \
              free(c, i); LINK(c, i).other = NOTHING } \
  :: d_step { LINK(c, i).reply != NOTHING -> read_answer(c, i) }

init {
  d_step {
    client[0].tries = TRIES; client[1].tries = TRIES;
    client[0].token = 1; client[1].token = 2
#ifdef SHARED
    ; client[2].tries = TRIES; client[2].token = 3
#endif
  }
end:
  do
  :: atomic {
    if
    :: d_step { true -> tick() }
    OF_CLIENT(0)
    OF_CLIENT(1)
    :: atomic { crashes > 0 -> LOSE(0) }
    :: atomic { crashes > 0 -> LOSE(1) }
    :: atomic { crashes > 0 -> LOSE(2) }
    OF_LINK(0, 0)
    OF_LINK(0, 1)
    OF_LINK(0, 2)
    OF_LINK(1, 0)
    OF_LINK(1, 1)
    OF_LINK(1, 2)
#ifdef SHARED
    OF_CLIENT(2)
    OF_LINK(2, 0)
    OF_LINK(2, 1)
    OF_LINK(2, 2)
#endif
    fi;
    sort()
  }
  od
}
