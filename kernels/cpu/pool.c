/* Threads for one step at a time. Between steps they sleep; at a barrier they first look for a few microseconds. */
#include "engine.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#ifndef LOOKS
#define LOOKS 400 /* looks at a barrier before sleep: a few microseconds */
#endif

struct Pool {
    int threads, started;
    pid_t process;      /* after a fork the threads are gone, and are started anew */
    pthread_mutex_t lock;
    pthread_cond_t begin, passed;
    long step;          /* under lock */
    int stop, active;   /* under lock; `active` threads take part in this step */
    Work work;
    void *argument;
    atomic_int arrived, asleep;
    atomic_long round;
    pthread_t thread[];
};

typedef struct {
    Pool *pool;
    int id;
} Seat;

static void *sit(void *seat_) {
    Seat seat = *(Seat *)seat_;
    free(seat_);
    Pool *p = seat.pool;
    long seen = 0;
    for (;;) {
        pthread_mutex_lock(&p->lock);
        while (p->step == seen && !p->stop) pthread_cond_wait(&p->begin, &p->lock);
        seen = p->step;
        const int stop = p->stop, active = p->active;
        pthread_mutex_unlock(&p->lock);
        if (stop) return 0;
        if (seat.id < active) {
            p->work(p->argument, seat.id, active);
            pool_wait(p, active);
        }
    }
}

static int start(Pool *p) {
    p->process = getpid();
    p->step = p->stop = p->started = 0;
    atomic_store(&p->arrived, 0);
    atomic_store(&p->asleep, 0);
    pthread_mutex_init(&p->lock, 0);
    pthread_cond_init(&p->begin, 0);
    pthread_cond_init(&p->passed, 0);
    for (int id = 1; id < p->threads; id++) {
        Seat *seat = malloc(sizeof *seat);
        if (!seat) return 0;
        *seat = (Seat){p, id};
        if (pthread_create(&p->thread[id], 0, sit, seat)) {
            free(seat);
            return 0;
        }
        p->started = id;
    }
    return 1;
}

Pool *pool_open(int threads) {
    Pool *p = calloc(1, sizeof *p + sizeof(pthread_t) * (size_t)threads);
    if (!p) return 0;
    p->threads = threads;
    if (start(p)) return p;
    pool_close(p);
    return 0;
}

void pool_close(Pool *p) {
    if (p->process == getpid()) {
        pthread_mutex_lock(&p->lock);
        p->stop = 1;
        pthread_cond_broadcast(&p->begin);
        pthread_mutex_unlock(&p->lock);
        for (int id = 1; id <= p->started; id++) pthread_join(p->thread[id], 0);
    }
    free(p);
}

int pool_size(const Pool *p) { return p->threads; }

void pool_run(Pool *p, Work work, void *argument, int threads) {
    if (threads > 1 && p->process != getpid()) start(p);
    if (threads > p->started + 1) threads = p->started + 1; /* no result depends on it */
    if (threads > 1) {
        pthread_mutex_lock(&p->lock);
        p->work = work;
        p->argument = argument;
        p->active = threads;
        p->step++;
        pthread_cond_broadcast(&p->begin);
        pthread_mutex_unlock(&p->lock);
    }
    work(argument, 0, threads);
    if (threads > 1) pool_wait(p, threads);
}

static void look(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Either the last to arrive sees a sleeper, or the sleeper sees the new round: both are sequentially consistent. */
void pool_wait(Pool *p, int threads) {
    if (threads == 1) return;
    const long round = atomic_load(&p->round);
    if (atomic_fetch_add(&p->arrived, 1) == threads - 1) {
        atomic_store(&p->arrived, 0);
        atomic_fetch_add(&p->round, 1);
        if (atomic_load(&p->asleep)) {
            pthread_mutex_lock(&p->lock);
            pthread_cond_broadcast(&p->passed);
            pthread_mutex_unlock(&p->lock);
        }
        return;
    }
    for (int i = 0; i < LOOKS; i++) {
        if (atomic_load(&p->round) != round) return;
        look();
    }
    pthread_mutex_lock(&p->lock);
    atomic_fetch_add(&p->asleep, 1);
    while (atomic_load(&p->round) == round) pthread_cond_wait(&p->passed, &p->lock);
    atomic_fetch_sub(&p->asleep, 1);
    pthread_mutex_unlock(&p->lock);
}
